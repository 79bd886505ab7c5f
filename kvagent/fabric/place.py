"""Where a process runs, as far as it decides whether UCX can read from one process in another."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec

__all__ = ["Place", "read_place"]

Name = Annotated[str, msgspec.Meta(max_length=64)]


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The names of namespaces are the kernel's, "pid:[4026531836]", and compare on one host only;
    what cannot be told is empty."""

    boot_id: Name
    """Of the running kernel: the same in all containers of a host."""
    pid_namespace: Name
    user_namespace: Name
    uid: int

    def same_host(self, other: Place | None) -> bool | None:
        """None when that cannot be told."""
        if other is None or not (self.boot_id and other.boot_id):
            return None
        return self.boot_id == other.boot_id


def read_place(root: Path = Path("/")) -> Place:
    """This process's."""
    try:
        boot_id = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot_id = ""
    return Place(
        boot_id=boot_id,
        pid_namespace=namespace("pid", root),
        user_namespace=namespace("user", root),
        uid=os.geteuid(),
    )


def namespace(kind: str, root: Path = Path("/")) -> str:
    """The kernel's name of this process's namespace of a kind; empty where it has none."""
    try:
        return os.readlink(root / "proc/self/ns" / kind)
    except OSError:
        return ""

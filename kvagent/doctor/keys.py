"""The folder of keys: readable to the sidecar, and to nobody else."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvagent.doctor.facts import Finding, Severity

__all__ = ["KeyFile", "check_keys", "look_at_keys"]


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder of keys. `secret`: only its owner may read it."""

    path: str
    mode: int
    owner: int
    readable: bool
    secret: bool


def look_at_keys(folder: Path) -> list[KeyFile]:
    """The folder and everything in it; nothing when it is not there."""
    if not folder.is_dir():
        return []
    found = []
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.stat()
        found.append(
            KeyFile(
                path=str(path),
                mode=stat.S_IMODE(status.st_mode),
                owner=status.st_uid,
                readable=os.access(path, os.R_OK),
                secret=path.suffix == ".key_secret",
            )
        )
    return found


def check_keys(folder: str, files: Sequence[KeyFile], uid: int) -> Iterator[Finding]:
    """`uid` is that of the sidecar."""
    if not files:
        yield Finding("keys", Severity.ERROR, f"{folder} is no folder", "kvagent keys new DIR")
        return
    good = True
    for file in files:
        found = todo = ""
        if not file.readable:
            found, todo = "cannot be read", f"chown {uid} {file.path}"
        elif file.secret and file.mode & 0o077:
            found, todo = f"is open to others (mode {file.mode:o})", f"chmod 600 {file.path}"
        elif file.mode & 0o022:
            found, todo = (
                f"can be changed by others (mode {file.mode:o})",
                (f"chmod go-w {file.path}"),
            )
        elif file.owner not in (0, uid):
            found, todo = f"belongs to uid {file.owner}", f"chown {uid} {file.path}"
        if found:
            good = False
            yield Finding("keys", Severity.ERROR, f"{file.path} {found}", todo)
    if good:
        yield Finding("keys", Severity.OK, f"{folder}: {len(files) - 1} files, closed to others")

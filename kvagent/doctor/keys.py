"""The folder of keys: readable to the sidecar and to nobody else, and whose keys are in it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from kvagent.doctor.facts import Finding, Severity
from kvagent.errors import ConfigError
from kvagent.wire.keys import fingerprint, load_ring

__all__ = ["KeyFile", "Ring", "check_keys", "look_at_keys", "read_ring"]

SHOWN = 8


class KeyFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder of keys. `secret`: only its owner may read it."""

    path: str
    mode: int
    owner: int
    readable: bool
    secret: bool


class Ring(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprints: of the sidecar's own key, and of those that it talks with. `error`: why a
    sidecar would not start with this folder."""

    folder: str
    own: str = ""
    allowed: tuple[str, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        names = ", ".join(self.allowed[:SHOWN]) + (", ..." if len(self.allowed) > SHOWN else "")
        return f"own key {self.own}, allowed: {names or 'none'}"


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


def read_ring(folder: str) -> Ring:
    """Whose keys they are."""
    try:
        ring = load_ring(folder)
    except ConfigError as error:
        return Ring(folder=folder, error=str(error))
    return Ring(
        folder=folder,
        own=fingerprint(ring.own.public),
        allowed=tuple(sorted(fingerprint(key) for key in ring.allowed)),
    )


def check_keys(ring: Ring, files: Sequence[KeyFile], uid: int) -> Iterator[Finding]:
    """`uid` is that of the sidecar."""
    if not files:
        yield Finding("keys", Severity.ERROR, f"{ring.folder} is no folder", "kvagent keys new DIR")
        return
    problems = [*_doors(files, uid)]
    yield from problems
    if ring.error:
        # A secret that is open to others is such a problem, and has been said.
        if not problems:
            yield Finding("keys", Severity.ERROR, ring.error, "kvagent keys new DIR makes a pair")
    elif not ring.allowed:
        yield Finding(
            "keys",
            Severity.WARNING,
            f"{ring}: nobody can connect",
            f"put the public keys of the sidecars that this one talks with into {ring.folder}/"
            "allowed",
        )
    elif ring.own not in ring.allowed:
        yield Finding(
            "keys",
            Severity.INFO,
            f"{ring}; the own one is not among the allowed",
            "it has to be, if all sidecars share this pair",
        )
    elif not problems:
        yield Finding("keys", Severity.OK, f"{ring}; closed to others")


def _doors(files: Sequence[KeyFile], uid: int) -> Iterator[Finding]:
    """Files that somebody else may read or change, or that the sidecar may not."""
    for file in files:
        found = todo = ""
        if not file.readable:
            found, todo = "cannot be read", f"chown {uid} {file.path}"
        elif file.secret and file.mode & 0o077:
            found, todo = f"is open to others (mode {file.mode:o})", f"chmod 600 {file.path}"
        elif file.mode & 0o022:
            found, todo = (
                f"can be changed by others (mode {file.mode:o})",
                f"chmod go-w {file.path}",
            )
        elif file.owner not in (0, uid):
            found, todo = f"belongs to uid {file.owner}", f"chown {uid} {file.path}"
        if found:
            yield Finding("keys", Severity.ERROR, f"{file.path} {found}", todo)

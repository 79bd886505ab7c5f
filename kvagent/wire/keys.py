"""Keys in files: this sidecar's own pair, and the public keys of those it talks with.

    DIR/own.key_secret    the pair, mode 0600
    DIR/allowed/*.key     public keys of the sidecars that may connect here, and be connected to

In libzmq's certificate format: Curve25519 keys as Z85 text. Several sidecars may have the same
pair.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq.auth import load_certificate
from zmq.utils import z85

from kvagent.errors import ConfigError

__all__ = [
    "KeyPair",
    "KeyRing",
    "fingerprint",
    "fresh_ring",
    "load_ring",
    "look",
    "make_keys",
]

OWN = "own.key_secret"
ALLOWED = "allowed"
MAX_FILE_BYTES = 4096
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class KeyPair:
    """Z85 text, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class KeyRing:
    """`allowed`: file names by public key, the newest file first. `problems`: files that are not
    what they should be, in words; they allow nobody."""

    own: KeyPair
    allowed: dict[bytes, str]
    problems: tuple[str, ...] = ()

    def servers(self) -> list[bytes]:
        """The keys that another sidecar may have, the likely ones first."""
        mine = [self.own.public] if self.own.public in self.allowed else []
        return mine + [key for key in self.allowed if key != self.own.public]


def fingerprint(public: bytes) -> str:
    """Eight characters for people; the end of the file's name."""
    return hashlib.sha256(public).hexdigest()[:8]


# ---------------------------------------------------------------- reading


def load_ring(folder: str) -> KeyRing:
    """Raises `ConfigError` for anything that is not right."""
    ring = _read(folder, _read_own(Path(folder) / OWN))
    if ring.problems:
        raise ConfigError("; ".join(ring.problems))
    return ring


def fresh_ring(folder: str, old: KeyRing) -> KeyRing:
    """As the files are now. A pair that cannot be read (it is being replaced) stays the old one,
    and a bad file among the allowed ones allows nobody; `problems` names them."""
    try:
        return _read(folder, _read_own(Path(folder) / OWN))
    except ConfigError as error:
        ring = _read(folder, old.own)
        return KeyRing(ring.own, ring.allowed, (str(error), *ring.problems))


def look(folder: str) -> tuple[tuple[str, int, int, int], ...]:
    """Changes whenever a file does."""
    seen = []
    for path in [Path(folder) / OWN, *_allowed_files(folder)]:
        try:
            status = path.stat()
        except OSError:
            continue
        seen.append((path.name, status.st_ino, status.st_ctime_ns, status.st_size))
    return tuple(seen)


def _allowed_files(folder: str) -> list[Path]:
    return sorted((Path(folder) / ALLOWED).glob("*.key"))


def _read(folder: str, own: KeyPair) -> KeyRing:
    problems: list[str] = []
    found: list[tuple[float, bytes, str]] = []
    if not (Path(folder) / ALLOWED).is_dir():
        problems.append(
            f"keys: {folder}/{ALLOWED} is no folder; put the public keys of the sidecars that "
            "this one talks with there"
        )
    for path in _allowed_files(folder):
        try:
            public, _ = _certificate(path)
            found.append((path.stat().st_mtime, public, path.stem))
        except (OSError, ConfigError) as error:
            problems.append(_words(path, error))
    found.sort(reverse=True)
    return KeyRing(own, {public: name for _, public, name in found}, tuple(problems))


def _read_own(path: Path) -> KeyPair:
    try:
        mode = path.stat().st_mode
        public, secret = _certificate(path)
    except OSError as error:
        raise ConfigError(
            f"{_words(path, error)}; `kvagent keys new {path.parent}` makes a pair"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"keys: others can read {path} (mode {stat.S_IMODE(mode):o}): chmod 600 {path}, and "
            "make a new pair if somebody may have"
        )
    if secret is None or zmq.curve_public(secret) != public:
        raise ConfigError(f"keys: {path} holds no key pair")
    return KeyPair(public, secret)


def _certificate(path: Path) -> tuple[bytes, bytes | None]:
    """Raises `OSError` or `ConfigError`."""
    if path.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"keys: {path} is not a key: it is longer than {MAX_FILE_BYTES} bytes")
    try:
        keys = load_certificate(path)
        for key in keys:
            if key is not None and len(z85.decode(key)) != 32:
                raise ValueError("not 32 bytes")
    except (ValueError, LookupError, OverflowError) as error:
        raise ConfigError(f"keys: {path} is not a key in libzmq's format") from error
    return keys


def _words(path: Path, error: OSError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    return f"keys: cannot read {path}: {error.strerror}"


# ---------------------------------------------------------------- making


def make_keys(folder: str, name: str = "") -> tuple[Path, Path]:
    """A new pair, its public half allowed: the paths of the two files.

    `name` (default: the host's) is for people. Raises `ConfigError` rather than replace a pair.
    """
    name = name or socket.gethostname()
    if not _NAME.fullmatch(name):
        raise ConfigError(f"keys: {name!r} is no name: letters, digits and . _ - only")
    public, secret = zmq.curve_keypair()
    own = Path(folder) / OWN
    allowed = Path(folder) / ALLOWED / f"{name}-{fingerprint(public)}.key"
    try:
        own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        allowed.parent.mkdir(mode=0o700, exist_ok=True)
        _write(own, 0o600, _text(name, public, secret))
        _write(allowed, 0o644, _text(name, public, None))
    except FileExistsError as error:
        raise ConfigError(
            f"keys: {error.filename} exists and is not replaced; give another folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"keys: cannot write {error.filename}: {error.strerror}") from error
    return own, allowed


def _text(name: str, public: bytes, secret: bytes | None) -> str:
    def lines() -> Iterator[str]:
        if secret is not None:
            yield "# Secret: whoever has this file is one of this deployment's sidecars."
        yield f'metadata\n    name = "{name}"\ncurve\n    public-key = "{public.decode()}"'
        if secret is not None:
            yield f'    secret-key = "{secret.decode()}"'

    return "\n".join(lines()) + "\n"


def _write(path: Path, mode: int, text: str) -> None:
    """Never with a wider mode than `mode`, not even for a moment."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(file, "w", encoding="utf-8") as stream:
        stream.write(text)

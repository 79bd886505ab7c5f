"""Every setting of the sidecar, in one place, validated once.

Order of precedence: flags, then the TOML file. Each field's meaning is its docstring here.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvagent.core.chaos import ChaosConfig
from kvagent.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one sidecar. Durations are in seconds, sizes in bytes."""

    socket: str = ""
    """Path of the unix socket for the engine's processes (mode 0600); empty: none (embedded)."""
    bind: str = "127.0.0.1:0"
    """HOST:PORT of the control socket; port 0 takes a free one."""
    advertise: str = ""
    """Host that peers are told to dial; default: the bound host."""
    http: str = ""
    """HOST:PORT for /metrics, /healthz, /readyz and /status; empty: no HTTP."""
    insecure: bool = False
    """Allow the control socket on an address that other hosts can reach, without keys."""
    lease_seconds: float = 30.0
    """How long blocks are held without a sign of life from the consumer."""
    fetch_timeout: float = 60.0
    """A fetch that is not done by then fails."""
    handshake_timeout: float = 10.0
    """A first contact with a peer that takes longer fails the fetches that wait for it."""
    call_timeout: float = 5.0
    """How long one question to a peer (claim, complete) is asked again before it counts as lost."""
    drain_timeout: float = 30.0
    """On SIGTERM: how long transfers may go on before they are failed."""
    fence_seconds: float = 5.0
    """How long after its deadline a fetch waits for a peer that hangs, before its reads are ended
    by a fence. Other reads get as long to finish first."""
    piece_bytes: int = 4 << 20
    """Bytes handed to NIXL in one post."""
    inflight_bytes: int = 8 << 20
    """Most bytes in flight from one peer rank. Over TCP, with much more, a reader that is killed
    can crash its producer inside UCX."""
    staging_bytes: int = 32 << 20
    """Size of the buffer for reads whose runs are short; it is made when the first peer needs it.
    Not for states and GPU memory, which are always read directly. 0: none."""
    staging_run_bytes: int = 4096
    """Runs that are at least this long on average are never staged."""
    log_level: str = "info"
    """debug, info, warning or error."""
    chaos: ChaosConfig = ChaosConfig()
    """Control messages of this sidecar that go wrong on purpose, for drills: `[chaos]`."""

    def bind_address(self) -> tuple[str, int]:
        return split_address(self.bind, "bind")

    def http_address(self) -> tuple[str, int] | None:
        return split_address(self.http, "http") if self.http else None

    def is_loopback(self) -> bool:
        """Whether only this host can reach the control socket."""
        return _is_loopback(self.bind_address()[0])

    def advertised_host(self) -> str:
        """The host that peers are told; never one that means "any"."""
        return self.advertise or self.bind_address()[0]

    def validate(self) -> Config:
        """Returns itself, or raises `ConfigError` naming the setting and the fix."""
        host, _ = self.bind_address()
        self.http_address()
        if self.advertise and not _is_host(self.advertise):
            raise ConfigError(
                f"advertise {self.advertise!r} is not a host: write the address or the name alone, "
                "without port and brackets"
            )
        if _is_any(self.advertised_host()):
            raise ConfigError(
                f"bind {host!r} listens everywhere, but no peer can dial "
                f"{self.advertised_host()!r}: say which address they should use with "
                "--advertise HOST"
            )
        if not _is_loopback(host) and not self.insecure:
            raise ConfigError(
                f"bind {host!r} can be reached from other hosts and this connection has no keys: "
                "bind to loopback, or set insecure = true (--insecure) on a network you trust"
            )
        if _is_loopback(host) and self.advertise and not _is_loopback(self.advertise):
            raise ConfigError(
                f"advertise {self.advertise!r} cannot reach a socket bound to {host!r}: "
                "bind to that address too"
            )
        if _is_loopback(self.advertised_host()) and not _is_loopback(host):
            raise ConfigError(
                f"advertise {self.advertise!r} would make peers on other hosts dial themselves: "
                "bind to loopback too, or advertise an address of this host"
            )
        if not 1 <= self.lease_seconds <= 86400:
            raise ConfigError("lease_seconds must be from 1 to 86400 seconds")
        for name in ("fetch_timeout", "handshake_timeout", "call_timeout"):
            if not 0 < getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be more than 0 and at most 86400 seconds")
        for name in ("drain_timeout", "fence_seconds"):
            if not 0 <= getattr(self, name) <= 86400:
                raise ConfigError(f"{name} must be from 0 to 86400 seconds")
        if self.piece_bytes < 4096 or self.inflight_bytes < self.piece_bytes:
            raise ConfigError("piece_bytes must be at least 4096 and at most inflight_bytes")
        for name in ("staging_bytes", "staging_run_bytes"):
            if not 0 <= getattr(self, name) <= 1 << 40:
                raise ConfigError(f"{name} must be from 0 to 2**40")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"log_level {self.log_level!r}: debug, info, warning or error")
        return self


def load(path: str | None, flags: dict[str, Any]) -> Config:
    """The TOML file at `path`, if any, under the flags that were given (not None)."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read {path!r}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path!r} is not TOML: {error}") from error
    values |= {name: value for name, value in flags.items() if value is not None}
    for name in values:
        if name not in Config.__struct_fields__:
            close = difflib.get_close_matches(name, Config.__struct_fields__, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown setting {name!r}{hint}")
    try:
        return msgspec.convert(values, Config).validate()
    except msgspec.ValidationError as error:
        raise ConfigError(f"settings: {error}") from error


def split_address(text: str, name: str) -> tuple[str, int]:
    """("::1", 7100) from "[::1]:7100"; `ConfigError` names the setting."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{name} {text!r}: write an IPv6 address as [ADDRESS]:PORT")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{name} {text!r} is not HOST:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_.])?", host) is not None
    return True


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

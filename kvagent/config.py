"""Every setting of the sidecar, in one place, validated once.

Order of precedence: flags, environment variables (`KVAGENT_BIND` for `bind`), the TOML file, the
defaults here. The string below a field is all the documentation that it has: the README's table
and `kvagent config` are made from it. How values are read and put together: `settings`.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvagent.core.chaos import ChaosConfig
from kvagent.errors import ConfigError
from kvagent.fabric.witness import TRANSPORTS
from kvagent.settings import PREFIX, Layer, build, flatten, read_environ, read_file
from kvagent.wire.messages import KINDS

__all__ = ["Config", "Effective", "join_address", "load", "load_command", "split_address"]

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
KV_BUFFERS = ("device", "host")


class Problem(NamedTuple):
    """A contradiction, and the settings that it lies in."""

    settings: tuple[str, ...]
    text: str


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one sidecar. Durations are in seconds, sizes in bytes."""

    socket: str = ""
    """Unix socket for the engine's processes, mode 0600; only processes of the same uid, or root,
    get in. Empty: none (embedded)."""
    bind: str = "127.0.0.1:0"
    """HOST:PORT of the control socket; port 0 takes a free one; IPv6 as `[ADDRESS]:PORT`."""
    advertise: str = ""
    """Host that peers are told to dial; empty: the bound host."""
    http: str = ""
    """HOST:PORT for `/metrics`, `/healthz`, `/readyz`, `/status`; empty: no HTTP."""
    keys: str = ""
    """Folder made by `kvagent keys new`: control connections are encrypted, and only to and from
    sidecars whose public keys are in its `allowed` folder. Empty: neither."""
    insecure: bool = False
    """Allow `bind` beyond loopback without `keys`."""
    lease_seconds: float = 30.0
    """How long offered blocks are held without a sign of life from the consumer, 1 or more."""
    fetch_timeout: float = 60.0
    """Seconds after which a fetch fails."""
    handshake_timeout: float = 10.0
    """Seconds for each question of the first contact with an engine."""
    call_timeout: float = 5.0
    """Seconds for which a question (claim, complete) is repeated before it counts as lost."""
    drain_timeout: float = 30.0
    """On SIGTERM: seconds for which open transfers may go on."""
    fence_seconds: float = 5.0
    """How long after `fetch_timeout` reads still in flight are waited for before they are cut off.
    Other reads get as long to finish first."""
    piece_bytes: int = 2 << 20
    """Bytes handed to NIXL in one post, 4096 or more; over shared memory, where a post copies, up
    to `inflight_bytes`."""
    inflight_bytes: int = 8 << 20
    """Most bytes in flight from one peer rank. With much more over TCP, a reader that is killed can
    crash its producer inside UCX."""
    staging_bytes: int = 32 << 20
    """Buffer for reads whose runs are short: whole blocks are read into it and permuted from there.
    It lies where the cache does, on host or GPU. Made when the first peer needs it; 0: none. States
    are always read directly."""
    staging_run_bytes: int = 4096
    """Runs that are at least this long on average are never staged."""
    kv_buffer: str = "device"
    """Of a cache on a GPU: `device`: the GPU's memory is read from and written into. `host`: by way
    of a copy of the whole cache in host memory, for transports that cannot take GPU memory."""
    nics: tuple[str, ...] = ()
    """Of a cache on a GPU: what UCX_NET_DEVICES is set to, unless it is set; for example
    `["mlx5_0:1", "eth0"]`. Empty: the RDMA ports next to that GPU, and every other interface. Not
    when embedded."""
    expected_transport: tuple[str, ...] = ()
    """What peers' bytes should come by: of `shared_memory`, `cuda_ipc`, `rdma` and `tcp`. The log
    warns of peers that are read by another one. Empty: no expectation."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "text"
    """`text`, or `json`: one object per line."""
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

    def problems(self) -> Iterator[Problem]:
        """Why these values cannot be used. After a malformed address nothing more is looked at."""
        addresses = {"bind": self.bind} | ({"http": self.http} if self.http else {})
        for name, text in addresses.items():
            try:
                split_address(text, name)
            except ConfigError as error:
                yield Problem((name,), str(error))
                return
        yield from self._address_problems()
        yield from self._bound_problems()
        try:
            self.chaos.validate(KINDS)
        except ConfigError as error:
            yield Problem(("chaos",), str(error))

    def _address_problems(self) -> Iterator[Problem]:
        host, _ = self.bind_address()
        both = ("bind", "advertise")
        if self.advertise and not _is_host(self.advertise):
            yield Problem(
                ("advertise",),
                f"advertise {self.advertise!r} is not a host: write the address or the name alone, "
                "without port and brackets",
            )
        if _is_any(self.advertised_host()):
            yield Problem(
                both,
                f"bind {host!r} listens everywhere, but no peer can dial "
                f"{self.advertised_host()!r}: say which address they should use with "
                "--advertise HOST",
            )
        if not _is_loopback(host) and not self.keys and not self.insecure:
            yield Problem(
                ("bind", "keys"),
                f"bind {host!r} can be reached from other hosts, and there are no keys: make some "
                "with `kvagent keys new DIR` and set keys = DIR (--keys DIR), bind to loopback, or "
                "set insecure = true (--insecure) on a network you trust",
            )
        if _is_loopback(host) and self.advertise and not _is_loopback(self.advertise):
            yield Problem(
                both,
                f"advertise {self.advertise!r} cannot reach a socket bound to {host!r}: "
                "bind to that address too",
            )
        if _is_loopback(self.advertised_host()) and not _is_loopback(host):
            yield Problem(
                both,
                f"advertise {self.advertise!r} would make peers on other hosts dial themselves: "
                "bind to loopback too, or advertise an address of this host",
            )

    def _bound_problems(self) -> Iterator[Problem]:
        if not 1 <= self.lease_seconds <= 86400:
            yield Problem(("lease_seconds",), "lease_seconds must be from 1 to 86400 seconds")
        for name in ("fetch_timeout", "handshake_timeout", "call_timeout"):
            if not 0 < getattr(self, name) <= 86400:
                yield Problem((name,), f"{name} must be more than 0 and at most 86400 seconds")
        for name in ("drain_timeout", "fence_seconds"):
            if not 0 <= getattr(self, name) <= 86400:
                yield Problem((name,), f"{name} must be from 0 to 86400 seconds")
        if self.piece_bytes < 4096 or self.inflight_bytes < self.piece_bytes:
            yield Problem(
                ("piece_bytes", "inflight_bytes"),
                "piece_bytes must be at least 4096 and at most inflight_bytes",
            )
        for name in ("staging_bytes", "staging_run_bytes"):
            if not 0 <= getattr(self, name) <= 1 << 40:
                yield Problem((name,), f"{name} must be from 0 to 2**40")
        if self.kv_buffer not in KV_BUFFERS:
            yield Problem(("kv_buffer",), f"kv_buffer {self.kv_buffer!r}: device or host")
        if self.log_level not in LOG_LEVELS:
            yield Problem(
                ("log_level",), f"log_level {self.log_level!r}: debug, info, warning or error"
            )
        if self.log_format not in LOG_FORMATS:
            yield Problem(("log_format",), f"log_format {self.log_format!r}: text or json")
        for name in self.expected_transport:
            if name not in TRANSPORTS:
                yield Problem(
                    ("expected_transport",),
                    f"expected_transport {name!r}: shared_memory, cuda_ipc, rdma or tcp",
                )


class Effective(NamedTuple):
    """Settings, and where each came from: a file's path, a variable, a flag, or "default"."""

    config: Config
    sources: dict[str, str]


def load_command(
    path: str | None, flags: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> Effective:
    """The settings of a command: flags that were given (not None), `environ`, the file at `path`.

    The file may be named by `KVAGENT_CONFIG` too. Raises `ConfigError`.
    """
    path = path or environ.get(f"{PREFIX}CONFIG") or None
    layers = [] if path is None else [read_file(Config, path)]
    layers.append(read_environ(Config, environ))
    given = {name: value for name, value in flags.items() if value is not None}
    layers.append(Layer.of(given, "--{}"))
    return _effective(layers)


def load(path: str | None, arguments: Mapping[str, Any]) -> Config:
    """The settings of a program that embeds a sidecar: its arguments that are not None, then the
    file, and no environment. Raises `ConfigError`."""
    given = {name: value for name, value in arguments.items() if value is not None}
    layers = [] if path is None else [read_file(Config, path)]
    layers.append(Layer.of(flatten(Config, given, "the arguments"), "{}="))
    return _effective(layers).config


def _effective(layers: list[Layer]) -> Effective:
    config, sources = build(Config, layers)
    for problem in config.problems():
        # A section stands for those of its settings that somebody gave.
        named = [
            name
            for setting in problem.settings
            for name, source in sources.items()
            if name == setting or (name.startswith(f"{setting}.") and source != "default")
        ]
        origins = [f"{name} is from {sources[name]}" for name in named]
        raise ConfigError(f"{problem.text} ({'; '.join(origins)})")
    return Effective(config, sources)


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

"""The compose file as types. Pure. What it says and we do not know is refused, never passed over.

Of a service, `ENGINE_ONLY` is what takes a container engine; everything else is done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import yaml

from kvagent.errors import ConfigError

__all__ = ["ENGINE_ONLY", "Compose", "Mount", "Service", "read_compose"]

ENGINE_ONLY = {
    "image": "there is no image: the programs are this environment's",
    "build": "the same",
    "restart": "a process that ends is an error here",
    "read_only": "the files are the machine's own",
    "tmpfs": "the same",
    "cap_drop": "root without capabilities could not read a clone in somebody's home folder",
    "security_opt": "the same",
    "ports": "the host's side of every network is here, and reaches all services",
    "stop_grace_period": "nothing is under way when the processes are ended",
}
"""Settings of a service without an effect here, and why."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Build(_Strict, frozen=True, kw_only=True):
    context: str
    dockerfile: str
    target: str
    args: dict[str, str] = {}


class HealthCheck(_Strict, frozen=True, kw_only=True):
    """`test` is `["CMD", program, ...]`. The times are for a container engine, which looks again
    and again; here somebody waits for the first success."""

    test: list[str]
    interval: str
    timeout: str
    retries: int
    start_period: str
    start_interval: str


class Dependency(_Strict, frozen=True, kw_only=True):
    condition: Literal["service_started", "service_healthy", "service_completed_successfully"]


class Service(_Strict, frozen=True, kw_only=True):
    image: str
    build: Build | None = None
    entrypoint: list[str] | None = None
    command: list[str] = []
    environment: dict[str, str] = {}
    depends_on: dict[str, Dependency] = {}
    healthcheck: HealthCheck | None = None
    networks: list[str] = []
    network_mode: Literal["none"] | None = None
    volumes: list[str] = []
    restart: str = "no"
    read_only: bool = False
    tmpfs: list[str] = []
    cap_drop: list[str] = []
    security_opt: list[str] = []
    ports: list[str] = []
    stop_grace_period: str = "10s"

    def mounts(self) -> list[Mount]:
        return [_mount(text) for text in self.volumes]


class Mount(NamedTuple):
    """A named volume (or a file beside the compose file) and where a service sees it."""

    source: str
    target: str
    read_only: bool


class Network(_Strict, frozen=True, kw_only=True):
    internal: bool = False


class TmpfsOptions(_Strict, frozen=True, kw_only=True):
    """Options of Docker's local volume driver; `o` is what mount(8) takes."""

    type: Literal["tmpfs"]
    device: Literal["tmpfs"]
    o: str


class Volume(_Strict, frozen=True, kw_only=True):
    """Without options: a folder that stays."""

    driver_opts: TmpfsOptions | None = None


class Compose(_Strict, frozen=True, kw_only=True):
    name: str
    services: dict[str, Service]
    networks: dict[str, Network | None]
    volumes: dict[str, Volume | None]

    def ours(self) -> dict[str, Service]:
        """The services of an image that one of them builds; the others are other people's
        programs. In an order in which each comes after those that it depends on."""
        found: dict[str, Service] = {}
        built = {each.image for each in self.services.values() if each.build is not None}
        waiting = {name: each for name, each in self.services.items() if each.image in built}
        while waiting:
            ready = [
                n for n, each in waiting.items() if not each.depends_on.keys() & waiting.keys()
            ]
            if not ready:
                raise ConfigError(f"these services depend on each other: {', '.join(waiting)}")
            found.update((name, waiting.pop(name)) for name in ready)
        return found


def read_compose(path: Path) -> Compose:
    """Raises `ConfigError`, also for what this module does not know."""
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} is not a compose file")
    # Fragments, which YAML's anchors have put where they belong.
    wanted: dict[str, Any] = {key: raw[key] for key in raw if not str(key).startswith("x-")}
    try:
        compose = msgspec.convert(wanted, Compose)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}; kvagent.two_nodes.compose knows no more") from error
    _check(path, compose)
    return compose


def _check(path: Path, compose: Compose) -> None:
    """Every name that is used is defined."""
    for name, service in compose.services.items():
        volumes = [m.source for m in service.mounts() if not m.source.startswith(".")]
        for kind, used, known in (
            ("network", service.networks, compose.networks.keys()),
            ("volume", volumes, compose.volumes.keys()),
            ("service", service.depends_on, compose.services.keys()),
        ):
            for each in used:
                if each not in known:
                    raise ConfigError(f"{path}: {name}: there is no {kind} {each!r}")


def _mount(text: str) -> Mount:
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target.startswith("/") or mode not in ("", "ro"):
        raise ConfigError(f"volume {text!r} is not SOURCE:/TARGET or SOURCE:/TARGET:ro")
    return Mount(source, target, mode == "ro")

"""Which server gets the next request: round robin that skips the ones which just failed.

A server that fails cools down. When the cool-down is over it is *due*: one request is sent to it
as a trial, and picking it for that starts the next cool-down at once, so the others keep skipping
it until the trial's success ends the cool-down. A trial that is abandoned (its client went away)
therefore needs no clean-up: the next one comes a cool-down later.

Pure: no sockets, and the time is an argument (seconds of a monotonic clock). There is no probing
in the background; what is known of a server is what requests found out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvagent.errors import ConfigError


@dataclass(eq=False)
class Server:
    """One upstream server."""

    url: str
    failures: int = 0  # in a row; 0 means up
    retry_at: float = 0.0  # when the cool-down ends; meaningless while up
    last_error: str = ""

    def describe(self, now: float) -> dict[str, Any]:
        """Its state, JSON-able: `up`, `cooling`, or `due` (the next request is a trial)."""
        if not self.failures:
            return {"url": self.url, "state": "up"}
        return {
            "url": self.url,
            "state": "cooling" if now < self.retry_at else "due",
            "failures": self.failures,
            "last_error": self.last_error,
            "retry_in_seconds": round(max(0.0, self.retry_at - now), 3),
        }


class Pool:
    """The servers of one kind, in turn."""

    def __init__(self, kind: str, urls: Sequence[str], cooldown: float) -> None:
        """`kind` is for messages; raises `ConfigError` for an empty list or a URL of no use."""
        if not urls:
            raise ConfigError(f"the proxy needs at least one {kind} server: give --{kind} URL")
        self.servers = [Server(_base_url(kind, url)) for url in urls]
        self.kind = kind
        self._cooldown = cooldown
        self._turn = 0

    def pick(self, now: float, *, avoid: Server | None = None) -> Server | None:
        """The next server that is up or due for a trial; None while all of them cool down."""
        for server in self._in_turn(avoid):
            if server.failures and now < server.retry_at:
                continue
            if server.failures:
                server.retry_at = now + self._cooldown
            return self._take(server)
        return None

    def pick_any(self, now: float, *, avoid: Server | None = None) -> Server:
        """As `pick`, but a cooling server rather than none."""
        return self.pick(now, avoid=avoid) or self._take(self._in_turn(avoid)[0])

    def succeeded(self, server: Server) -> None:
        """It answered: it is up."""
        server.failures = 0

    def failed(self, server: Server, now: float, error: str) -> None:
        """It failed: it cools down from now on."""
        server.failures += 1
        server.retry_at = now + self._cooldown
        server.last_error = error

    def available(self, now: float) -> bool:
        """Whether `pick` would find a server."""
        return any(not s.failures or now >= s.retry_at for s in self.servers)

    def _in_turn(self, avoid: Server | None) -> list[Server]:
        """All servers from whose turn it is; without `avoid`, unless it is the only one."""
        order = self.servers[self._turn :] + self.servers[: self._turn]
        return [server for server in order if server is not avoid] or order

    def _take(self, server: Server) -> Server:
        self._turn = (self.servers.index(server) + 1) % len(self.servers)
        return server


def _base_url(kind: str, url: str) -> str:
    base = url.rstrip("/")
    try:
        parts = urlsplit(base)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that does not parse
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ConfigError(f"--{kind} {url!r} is not a server's URL: write http://HOST:PORT")
    if parts.path.endswith("/v1"):
        raise ConfigError(f"--{kind} {url!r}: leave out the /v1, the proxy adds it")
    return base

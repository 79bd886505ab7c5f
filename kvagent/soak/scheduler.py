"""The scheduler of a soak's engine, in a process of its own, to be killed at any moment.

It owns the blocks, and does as told: offers, fetches, cancels. What becomes of a request it learns
through `step()` only, and it gives blocks away and overwrites them as soon as that allows.

When its sidecar is gone, it opens a new `EngineClient` by itself, as often as it takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from kvagent import EngineClient, KVConnectorOutput
from kvagent.errors import AgentError, AgentLostError, KVAgentError, TicketError
from kvagent.soak.messages import (
    Cancel,
    Check,
    Checked,
    Command,
    DropPeer,
    Event,
    Fetch,
    Offer,
    Offered,
    Pipe,
    Received,
    Refused,
    Release,
    Sent,
    Up,
    Wrong,
)
from kvagent.soak.pool import Pool
from kvagent.soak.shapes import RankMemory, Shape
from kvagent.soak.worker import AGAIN_SECONDS, START_SECONDS, log_to

POLL_SECONDS = 0.003
PROBE_SECONDS = 0.5
LOST_SECONDS = 40.0
"""Longer than a client takes to report what was open when its sidecar died."""


@dataclass(slots=True)
class _Lent:
    """Blocks of an offer: those of a shared prefix are held by `prefix`."""

    blocks: list[int]
    prefix: int = 0


@dataclass(slots=True)
class _Prefix:
    blocks: list[int]
    users: int = 0


@dataclass(slots=True)
class _Old:
    """A client that has lost its sidecar, and what it has still to report."""

    client: EngineClient
    requests: set[str]
    until: float


@dataclass(slots=True)
class _Scheduler:
    pipe: Pipe[Command]
    shape: Shape
    pool: Pool
    socket: str
    client: EngineClient | None = None
    old: list[_Old] = field(default_factory=list)
    ready: bool = False
    refusals: list[str] = field(default_factory=list)
    again_at: float = 0.0
    lent: dict[str, _Lent] = field(default_factory=dict)
    borrowed: dict[str, tuple[list[int], Fetch]] = field(default_factory=dict)
    prefixes: dict[int, _Prefix] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    """Requests of one report each that have had it."""

    def run(self) -> None:
        while True:
            self._attach()
            self.pipe.waits(POLL_SECONDS)
            while self.pipe.waits():
                self._obey(self.pipe.receive())
            if self.client is not None:
                self._take(self.client.step())
            self._take_old()

    # ------------------------------------------------------------ the sidecar

    def _attach(self) -> None:
        if time.monotonic() < self.again_at:
            return
        if self.ready:
            self.again_at = time.monotonic() + PROBE_SECONDS
            self._probe()
            return
        try:
            if self.client is None:
                self.client = EngineClient(self.socket, timeout=0.01)
            self.client.wait_ready(0.05)
        except AgentError as error:
            if not str(error).startswith("not ready after"):
                # Refused, or gone. With it went what it was told to do: all of it is reported.
                self.refusals.append(str(error))
                if self.client is not None:
                    self._lost()
            self.again_at = time.monotonic() + AGAIN_SECONDS
            return
        self.ready = True
        self._say(Up(self.refusals))
        self.refusals = []

    def _probe(self) -> None:
        """Notices a lost sidecar while there is nothing to do. No call of the client says that
        it is lost but one that would start something: this one is refused either way."""
        assert self.client is not None
        try:
            self.client.fetch("probe", {}, [])
        except TicketError:
            pass
        except AgentLostError:
            self._lost()

    def _lost(self) -> None:
        """The client is kept until it has reported everything."""
        assert self.client is not None
        requests = {*self.lent, *self.borrowed}.difference(*(old.requests for old in self.old))
        self.old.append(_Old(self.client, requests, time.monotonic() + LOST_SECONDS))
        self.client, self.ready = None, False

    def _take_old(self) -> None:
        for old in list(self.old):
            self._take(old.client.step())
            old.requests &= self.lent.keys() | self.borrowed.keys()
            if time.monotonic() > old.until:
                for request in old.requests:
                    self._say(Wrong(f"{request} was not reported when the sidecar was lost"))
                old.requests.clear()
            if not old.requests:
                old.client.close()
                self.old.remove(old)

    # ------------------------------------------------------------ commands

    def _obey(self, command: Command) -> None:
        if isinstance(command, Check):
            written = self.pool.written_free()
            if written:
                self._say(Wrong("free blocks were written to", written))
            self._say(Checked(len(self.lent) + len(self.borrowed)))
            return
        request = command.request if isinstance(command, Offer | Fetch) else ""
        if self.client is None or not self.ready:
            if request:
                self._say(Refused(request, "no sidecar"))
            return
        try:
            match command:
                case Offer():
                    self._offer(self.client, command)
                case Fetch():
                    self._fetch(self.client, command)
                case Cancel():
                    self.client.cancel(command.request)
                case Release():
                    self.client.release(command.ticket)
                case DropPeer():
                    self.client.drop_peer(command.engine_id)
        except KVAgentError as error:
            if request:
                self._say(Refused(request, f"{type(error).__name__}: {error}"))
            if isinstance(error, AgentLostError):
                self._lost()

    def _offer(self, client: EngineClient, command: Offer) -> None:
        spans, prefix = command.spans, 0
        shared = spans[0][1] if len(spans) > 1 else 0
        if shared and not self._share(spans[0]):
            return self._say(Refused(command.request, "no free blocks"))
        if shared:
            prefix = spans[0][0]
        tokens = spans[-1][1]
        own = self._get(-(-(tokens - shared) // self.shape.block_size))
        if not own:
            self._unshare(prefix)
            return self._say(Refused(command.request, "no free blocks"))
        self.pool.fill(own, spans, shared)
        blocks = [*(self.prefixes[prefix].blocks if prefix else []), *own]
        tickets = []
        try:
            for _ in range(command.copies):
                tickets.append(client.offer(command.request, blocks, tokens))  # noqa: PERF401
        except KVAgentError:
            if not tickets:
                self.pool.give(own)
                self._unshare(prefix)
                raise
        self.lent[command.request] = _Lent(own, prefix)
        return self._say(Offered(command.request, tickets))

    def _fetch(self, client: EngineClient, command: Fetch) -> None:
        tokens = command.spans[-1][1]
        blocks = self._get(-(-tokens // self.shape.block_size) + command.spare_blocks)
        if not blocks:
            return self._say(Refused(command.request, "no free blocks"))
        try:
            client.fetch(command.request, command.ticket, blocks, command.start_token)
        except KVAgentError:
            self.pool.give(blocks)
            raise
        self.borrowed[command.request] = (blocks, command)
        return None

    # ------------------------------------------------------------ reports

    def _take(self, out: KVConnectorOutput) -> None:
        for request in out.finished_sending or ():
            lent = self.lent.pop(request, None)
            if lent is not None:
                self.pool.give(lent.blocks)
                self._unshare(lent.prefix)
                self.ended.add(request)
                self._say(Sent(request))
            elif request in self.ended:
                self._say(Wrong(f"the offer of {request} ended twice"))
        for request in out.finished_recving or ():
            if request in self.borrowed:
                self._received(request, out.failed_recving.get(request))
            elif request in self.ended:
                self._say(Wrong(f"the fetch of {request} ended twice"))

    def _received(self, request: str, reason: str | None) -> None:
        blocks, fetch = self.borrowed.pop(request)
        spans = fetch.spans if reason is None else None
        wrong, compared = self.pool.wrong(blocks, spans, fetch.start_token, fetch.spans[-1][1])
        if wrong:
            what = "good" if reason is None else "failed"
            self._say(Wrong(f"the {what} fetch of {request} left wrong bytes", wrong))
        self.pool.give(blocks)
        self.ended.add(request)
        self._say(Received(request, reason, compared))

    # ------------------------------------------------------------ blocks

    def _get(self, number: int) -> list[int]:
        blocks, written = self.pool.take(number)
        if written:
            self._say(Wrong(f"some of {number} blocks were written while free", written))
        return blocks

    def _share(self, span: tuple[int, int]) -> bool:
        seed, tokens = span
        if seed not in self.prefixes:
            blocks = self._get(tokens // self.shape.block_size)
            if not blocks:
                return False
            self.pool.fill(blocks, [span], 0)
            self.prefixes[seed] = _Prefix(blocks)
        self.prefixes[seed].users += 1
        return True

    def _unshare(self, seed: int) -> None:
        if not seed:
            return
        prefix = self.prefixes[seed]
        prefix.users -= 1
        if not prefix.users:
            self.pool.give(self.prefixes.pop(seed).blocks)

    def _say(self, event: Event) -> None:
        self.pipe.send(event)


def run_scheduler(
    connection: Connection, log: str, shape: Shape, paths: Sequence[str], socket: str, seed: int
) -> None:
    """Obeys until the pipe ends."""
    log_to(log)
    ranks = [RankMemory(shape, path) for path in paths]
    refusals: list[str] = []
    # Another scheduler's fetches may still write, until `wait_ready` returns.
    client = _first_client(socket, refusals)
    pool = Pool(shape, ranks, seed)
    scheduler = _Scheduler(Pipe(connection, Command), shape, pool, socket, client)
    scheduler.refusals = refusals
    try:
        scheduler.run()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _first_client(socket: str, refusals: list[str]) -> EngineClient:
    until = time.monotonic() + START_SECONDS
    while True:
        client = None
        try:
            client = EngineClient(socket, timeout=START_SECONDS)
            client.wait_ready(START_SECONDS)
            return client
        except AgentError as error:
            refusals.append(str(error))
            if client is not None:
                client.close()
            if time.monotonic() > until:
                raise
            time.sleep(AGAIN_SECONDS)

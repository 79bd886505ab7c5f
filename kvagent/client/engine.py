"""`EngineClient`: what a scheduler calls. No call waits for the sidecar but `wait_ready`/`drain`.

`step()` takes reports off the socket itself, so that no other thread has to get the interpreter
first. So does a thread, for a scheduler that is busy elsewhere, and to notice the sidecar's end.
Sends go straight to the socket, which takes them without blocking; when it is full (the sidecar is
stopped), they wait in a buffer that the thread flushes.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvagent.client.channel import Address, error_of, open_socket
from kvagent.client.ticket import make_ticket, read_ticket
from kvagent.core.output import KVConnectorOutput
from kvagent.cuda.handover import Handover
from kvagent.errors import AgentError, AgentLostError, DrainingError, KVAgentError
from kvagent.wire import local
from kvagent.wire.codec import BlockIds, pack_blocks, unpack_blocks
from kvagent.wire.messages import (
    Ack,
    Attach,
    Cancel,
    Drain,
    Drained,
    DropPeer,
    Failed,
    Fetch,
    Hold,
    Local,
    Offer,
    Quiesce,
    Quiesced,
    Ready,
    ReleaseTicket,
    Report,
    Resume,
    Waiting,
)

log = logging.getLogger("kvagent.client")

T = TypeVar("T")

READ_BYTES = 1 << 16
MAX_UNSENT = 64 << 20
"""Bytes that may wait for a sidecar that does not read."""
MAX_ATTEND = 1.0
"""Seconds; the thread may close the socket in the moment before it is waited at."""
LOST_NAP = 0.02
_ENDED = select.EPOLLHUP | select.EPOLLERR


class EngineClient:
    """The scheduler's side of the leader sidecar. One per engine; use it from one thread."""

    def __init__(
        self, address: Address, *, timeout: float = 10.0, handover: Handover | None = None
    ) -> None:
        """`handover` is there when the agent is a thread of this process: see `EmbeddedAgent`."""
        self._handover = handover
        self._socket = open_socket(address, timeout)
        self._socket.setblocking(False)
        self._reader = local.FrameReader()
        self._receive_lock = threading.Lock()
        self._reports: deque[Report] = deque()
        self._acked = 0
        self._offered: Counter[str] = Counter()
        self._fetching: dict[str, tuple[bytes, ...]] = {}
        """Open fetches, and the blocks that they write into."""
        self._unsent = bytearray()
        self._send_lock = threading.Lock()
        self._changed = threading.Condition()
        self._ready: Ready | None = None
        self._waiting = "the sidecar has not answered yet"
        self._drained: Drained | None = None
        self._quiesced: Quiesced | None = None
        self._failure: KVAgentError | None = None
        self._lost = False
        self._lost_at = 0.0
        self._nonsense: KVAgentError | None = None
        """What the sidecar sent makes no sense to us."""
        self._broken: AgentError | None = None
        self._draining = False
        self._wake_read, self._wake_write = socket.socketpair()
        self._poller = select.epoll()
        """The thread's."""
        self._poller.register(self._socket, select.EPOLLIN)
        self._poller.register(self._wake_read, select.EPOLLIN)
        self._attended = False
        """`wait` looks at what comes, and the thread need not."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvagent-client", daemon=True)
        self._thread.start()
        self._send(Attach())

    # ------------------------------------------------------------ contract

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Returns when every rank of this engine has its caches registered.

        Raises `AgentError` naming what is missing after `timeout` seconds.
        """
        until = time.monotonic() + timeout
        with self._changed:
            while self._ready is None:
                self._check()
                if not self._changed.wait(until - time.monotonic()):
                    raise AgentError(f"not ready after {timeout:g} s: {self._waiting}")

    def offer(
        self, request_id: str, block_ids: BlockIds, num_tokens: int, event: Any = None
    ) -> dict[str, Any]:
        """Offers the first `num_tokens` tokens of a request, held in `block_ids`; no round trip.

        Call it when the bytes are in the cache: on a GPU, when the results of the step that
        computed them are on the host. The blocks belong to the transfer until `request_id` comes
        out of `step()` in `finished_sending`. Returns the ticket.

        With `event`, a recorded `torch.cuda.Event` after which the bytes are there, it may be
        called before: the offer is visible to other engines when the event has passed, and the
        fetch reads nothing before. Of several ranks, an event of rank 0 behind the step's last
        collective speaks for all. Only an embedded agent can wait for one. An event that fails, or
        takes longer than a lease, ends the offer, and the fetch fails (`unknown`).
        """
        ready = self._require_ready()
        _check_name(request_id)
        _check_int("num_tokens", num_tokens)
        if num_tokens < 1:
            raise AgentError(f"offer of {num_tokens} tokens: there is nothing to send")
        blocks = pack_blocks(block_ids)
        if event is not None and self._handover is None:
            raise AgentError(
                "a CUDA event means nothing to another process: call event.synchronize() before "
                "offer(), or use EmbeddedAgent"
            )
        deferred = ready.deferred or event is not None
        secret = os.urandom(32)
        transfer_id, token = secret[:16].hex(), secret[16:]
        self._send(
            Offer(
                request_id=request_id,
                transfer_id=transfer_id,
                token=token,
                blocks=blocks,
                num_tokens=num_tokens,
                event=self._handover.give(event) if event is not None and self._handover else 0,
                deferred=deferred,
            )
        )
        self._offered[request_id] += 1
        return make_ticket(ready, request_id, transfer_id, token, block_ids, num_tokens, deferred)

    def fetch(
        self,
        request_id: str,
        ticket: Mapping[str, Any],
        block_ids: BlockIds,
        start_token: int = 0,
    ) -> None:
        """Starts to fetch a ticket's tokens from `start_token` on into `block_ids`.

        `block_ids` hold the request's tokens from token 0 (the blocks of a prefix hit included,
        which are not written). They belong to the transfer until `request_id` comes out of
        `step()` in `finished_recving`, with a reason in `failed_recving` when it failed. On a GPU,
        no kernel that still runs may use them, and those that are launched after `step()` see the
        bytes.
        """
        self._require_ready()
        _check_name(request_id)
        _check_int("start_token", start_token)
        parsed = read_ticket(ticket)
        if request_id in self._fetching:
            raise AgentError(f"request {request_id!r} is being fetched already")
        if start_token < 0:
            raise AgentError(f"start_token {start_token} is negative")
        if start_token >= parsed.num_tokens:
            raise AgentError(
                f"start_token {start_token} leaves none of {parsed.num_tokens} tokens "
                "to read; on a full prefix hit call release(ticket) instead"
            )
        local_blocks = pack_blocks(block_ids)
        self._send(
            Fetch(
                request_id=request_id,
                engine_id=parsed.engine_id,
                host=parsed.host,
                port=parsed.port,
                epoch=parsed.epoch,
                transfer_id=parsed.transfer_id,
                token=parsed.token,
                num_tokens=parsed.num_tokens,
                remote_blocks=parsed.blocks,
                local_blocks=local_blocks,
                start_token=start_token,
                traceparent=parsed.traceparent,
                deferred=parsed.deferred,
            )
        )
        self._fetching[request_id] = local_blocks

    def hold(self, ticket: Mapping[str, Any]) -> None:
        """A fetch of this ticket will come, but its request has no blocks yet: from now on the
        lease is renewed, until `fetch` or `release` of the ticket, or this scheduler's end. It may
        fail without a word; then the fetch is told."""
        self._require_ready()
        parsed = read_ticket(ticket)
        self._send(
            Hold(
                engine_id=parsed.engine_id,
                host=parsed.host,
                port=parsed.port,
                epoch=parsed.epoch,
                transfer_id=parsed.transfer_id,
                token=parsed.token,
                num_tokens=parsed.num_tokens,
                remote_blocks=parsed.blocks,
                deferred=parsed.deferred,
            )
        )

    def release(self, ticket: Mapping[str, Any]) -> None:
        """The ticket is not needed: the producer's blocks go back at once."""
        parsed = read_ticket(ticket)
        self._send(
            ReleaseTicket(
                engine_id=parsed.engine_id,
                host=parsed.host,
                port=parsed.port,
                transfer_id=parsed.transfer_id,
                token=parsed.token,
            )
        )

    def cancel(self, request_id: str) -> None:
        """Ends the request's offers and its fetch. Its blocks come back through `step()` all the
        same; an unknown or finished request is no error."""
        _check_name(request_id)
        self._send(Cancel(request_id=request_id))

    def step(self) -> KVConnectorOutput:
        """Everything that ended since the last call, each request once.

        When the sidecar is gone, everything open is reported as ended: at once, but for fetches of
        an engine with several ranks, whose other sidecars have to stop first (about 20 s). Raises
        `AgentError` when the connection broke while the sidecar lives: then it may still write
        into blocks.
        """
        if self._broken is not None:
            raise self._broken
        out = KVConnectorOutput()
        lost = self._lost  # asked first: the thread may put reports in until it says so
        if not lost and self._receive_lock.acquire(blocking=False):
            try:
                self._receive()
            finally:
                self._receive_lock.release()
        if self._reports:
            self._take_reports(out)
        if lost and (self._offered or self._fetching):
            self._fail_all(out)
        return out

    def wait(self, timeout: float) -> bool:
        """Returns True as soon as `step()` has something to report or to raise, False after
        `timeout` seconds. For a scheduler that has nothing to compute meanwhile: one that calls
        `step()` over and over takes a part of a core from the sidecar. That the sidecar is gone is
        no report when nothing is open: see `wait_lost`.
        """
        until = time.monotonic() + timeout
        while not self._has_news():
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._attend(min(left, MAX_ATTEND))
        return True

    def drain(self, timeout: float = 30.0) -> tuple[str, ...]:
        """Takes no new work, waits for the rest; returns the requests that had to be failed.

        Their ends come through `step()` as always.
        """
        self._draining = True
        self._send(Drain(timeout=timeout))
        return self._answer(lambda: self._drained, timeout).left

    def quiesce(self, timeout: float = 30.0) -> tuple[str, ...]:
        """Until `resume()` no transfer starts: fetches that have not begun wait (their deadline
        runs), and other engines' fetches from here end with `quiesced`. Returns when none is known
        to be under way either, or after `timeout` seconds the requests that still are. What has
        been read for less than a second is not known: it is refused when it says that it is over,
        also after `resume()`. Nothing is written.
        """
        with self._changed:
            self._quiesced = None
        self._send(Quiesce(timeout=timeout))
        return self._answer(lambda: self._quiesced, timeout).left

    def resume(self) -> None:
        """Ends `quiesce`; what waited starts."""
        self._send(Resume())

    def wait_lost(self, timeout: float | None = None) -> bool:
        """Returns True when the sidecar is gone, or has ended this connection: then `step()`
        reports what was open, and new work needs a new client. False after `timeout` seconds.
        For a thread beside the scheduler's.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._lost, timeout)

    def drop_peer(self, engine_id: str) -> None:
        """That engine is gone: fail what waits for it now instead of at the deadline."""
        self._send(DropPeer(engine_id=engine_id))

    def close(self) -> None:
        """Ends the connection; the sidecar takes it for the end of this scheduler."""
        self._closing = True
        self._wake()
        self._thread.join(5.0)

    # ------------------------------------------------------------ inside

    def _has_news(self) -> bool:
        if self._reports or self._broken is not None:
            return True
        return self._lost and bool(self._offered or (self._fetching and self._all_stopped()))

    def _attend(self, timeout: float) -> None:
        """Takes what comes, or returns when something may have changed."""
        with self._send_lock:
            attended = self._attended = not self._lost
            if attended:
                self._watch()
        if not attended:
            time.sleep(min(timeout, LOST_NAP))
            return
        try:
            there = self._take_next(timeout)
        finally:
            with self._send_lock:
                self._attended = False
                if not self._lost:
                    self._watch()
        if not there:
            self.wait_lost(timeout)

    def _take_next(self, timeout: float) -> bool:
        """False when the connection has ended."""
        try:
            with self._receive_lock:  # what the thread began to take before that, it has taken now
                news = bool(self._reports) or self._nonsense is not None
            if not news:
                poll = select.poll()
                poll.register(self._socket, select.POLLIN)
                poll.poll(timeout * 1e3)
            with self._receive_lock:
                return self._receive() and self._nonsense is None
        except (OSError, ValueError):  # closed just now
            return False

    def _watch(self) -> None:
        """What the thread waits for. With the lock for sending."""
        events = 0 if self._attended else select.EPOLLIN
        if self._unsent:
            events |= select.EPOLLOUT
        self._poller.modify(self._socket, events)

    def _require_ready(self) -> Ready:
        if self._draining:
            raise DrainingError("this engine is draining and takes no new transfers")
        if self._lost and self._failure is not None:
            raise AgentError(f"the sidecar ended this connection: {self._failure}")
        if self._lost:
            raise AgentLostError("the sidecar is gone; start it again and open a new EngineClient")
        if self._ready is None:
            raise AgentError("not ready yet: call wait_ready() first")
        return self._ready

    def _answer(self, arrived: Callable[[], T | None], timeout: float) -> T:
        """What the sidecar says at the latest after `timeout` seconds of its own."""
        until = time.monotonic() + timeout + 10.0
        with self._changed:
            while (answer := arrived()) is None:
                self._check()
                if not self._changed.wait(until - time.monotonic()):
                    raise AgentError(f"the sidecar did not answer in {timeout + 10:g} s")
            return answer

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._lost:
            raise AgentLostError("the sidecar closed the connection; see its log")

    def _take_reports(self, out: KVConnectorOutput) -> None:
        sending: set[str] = set()
        recving: set[str] = set()
        fetches: dict[str, Any] = {}
        while self._reports:
            report = self._reports.popleft()
            if report.seq <= self._acked:
                continue  # delivered again because our acknowledgement was on its way
            self._acked = report.seq
            part = report.output
            for request_id, ended in report.offers.items():
                if request_id in self._offered:
                    self._offered[request_id] -= ended
                    if self._offered[request_id] <= 0:
                        del self._offered[request_id]
                        sending.add(request_id)
                elif request_id in (part.finished_sending or ()):  # offered by a scheduler before
                    sending.add(request_id)
            recving |= part.finished_recving or set()
            out.failed_recving.update(part.failed_recving)
            out.invalid_block_ids |= part.invalid_block_ids
            out.expected_finished_count = part.expected_finished_count
            if part.kv_connector_stats:
                fetches.update(part.kv_connector_stats["fetches"])
        out.finished_sending = sending or None
        out.finished_recving = recving or None
        out.kv_connector_stats = {"fetches": fetches} if fetches else None
        for request_id in recving:
            self._fetching.pop(request_id, None)
        self._send(Ack(seq=self._acked))

    def _fail_all(self, out: KVConnectorOutput) -> None:
        """The sidecar is dead, and with it its leases and all that could write our blocks; or it
        ended the connection, and before that every fetch and every lease. Other ranks' sidecars
        take a while to notice: only then are fetches reported."""
        out.finished_sending = (out.finished_sending or set()) | set(self._offered) or None
        self._offered.clear()
        if not self._all_stopped():
            return
        out.finished_recving = (out.finished_recving or set()) | set(self._fetching) or None
        for request_id, blocks in self._fetching.items():
            out.failed_recving[request_id] = "agent_lost: the sidecar of this engine is gone"
            for group in unpack_blocks(blocks):
                out.invalid_block_ids.update(group.tolist())
        self._fetching.clear()

    def _all_stopped(self) -> bool:
        orphan_seconds = self._ready.orphan_seconds if self._ready is not None else 0.0
        return time.monotonic() >= self._lost_at + orphan_seconds

    def _send(self, message: Local) -> None:
        data = local.frame(message)
        with self._send_lock:
            if self._lost:
                return  # step() reports every open request as failed
            sent = 0
            if not self._unsent:
                try:
                    sent = self._socket.send(data)
                except BlockingIOError:
                    pass
                except OSError:
                    return  # the thread sees the end of the stream and marks us lost
            if sent == len(data):
                return
            if len(self._unsent) + len(data) > MAX_UNSENT:
                raise AgentError("the sidecar does not read; is it stopped?")
            self._unsent += memoryview(data)[sent:]
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass

    def _run(self) -> None:
        poller, wake = self._poller, self._wake_read.fileno()
        try:
            while not self._closing:
                for fd, events in poller.poll():
                    if fd == wake:
                        self._wake_read.recv(4096)
                        continue
                    with self._receive_lock:
                        if self._attended and not events & _ENDED:
                            continue  # the scheduler sleeps until it sees this
                        if not self._receive() and self._nonsense is None:
                            return
                if self._nonsense is not None:
                    raise self._nonsense
                with self._send_lock:
                    self._flush()
                    self._watch()
        except KVAgentError as error:
            log.error("connection to the sidecar failed: %s", error)
            self._broken = AgentError(f"the connection to the sidecar broke: {error}")
        except OSError as error:
            log.error("connection to the sidecar failed: %s", error)
        finally:
            with self._send_lock:
                self._lost, self._lost_at = True, time.monotonic()
                self._socket.close()
                poller.close()
            with self._changed:
                self._changed.notify_all()
            self._wake_read.close()
            self._wake_write.close()

    def _flush(self) -> None:
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def _receive(self) -> bool:
        """Takes what has come. False at the end of the stream, which the thread acts upon, as it
        does upon nonsense."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except KVAgentError as error:
            self._nonsense = error
            self._wake()
        return True

    def _take(self, message: Local) -> None:
        if isinstance(message, Report):
            self._reports.append(message)
            return
        with self._changed:
            match message:
                case Ready():
                    self._ready = message
                case Waiting():
                    self._waiting = message.reason
                case Drained():
                    self._drained = message
                case Quiesced():
                    self._quiesced = message
                case Failed():
                    self._failure = error_of(message)
                    log.error("the sidecar refused: %s", message.message)
                case _:
                    log.error("the sidecar sent a %s", type(message).__name__)
            self._changed.notify_all()


def _check_name(request_id: str) -> None:
    """What the sidecar would refuse as no message, ending the connection, is refused here."""
    if not isinstance(request_id, str) or not request_id:
        raise AgentError(f"request_id must be a str that is not empty, not {request_id!r}")


def _check_int(name: str, value: int) -> None:
    if not isinstance(value, int):
        raise AgentError(f"{name} must be an int, not {value!r}")

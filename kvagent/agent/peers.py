"""What this rank knows of other engines: one `Session` for each, made by the handshake.

The handshake has two steps. `Hello` to the engine's leader compares protocol and fingerprint and
returns the layouts of all ranks; from them this rank decides which ranks it reads from. `Meet`
to each of those returns the metadata that opens its memory. Each step runs once, whoever waits
for it, in the background, and a peer that does not answer holds up nobody but its own fetches.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvagent.agent.identity import Identity
from kvagent.agent.remotes import Remotes
from kvagent.agent.staging import Staged, Staging
from kvagent.config import Config, join_address
from kvagent.core.plan import ReadPlan, assign, make_plan
from kvagent.errors import HandshakeError, KVAgentError, PeerGoneError
from kvagent.fabric.base import Fabric, Prepared, RemoteAgent
from kvagent.fabric.witness import UNKNOWN, Carried
from kvagent.wire.control import Control
from kvagent.wire.messages import Hello, Meet, Met, RankCard, Welcome
from kvagent.wire.peer import PeerClient

log = logging.getLogger("kvagent.peers")

MAX_SESSIONS = 4096
READS_AT_ONCE = 32
"""Parts that are read from one engine at a time; others take turns, in the order they came. More
would share the same wire, and all of them would end late."""
IDLE_SECONDS = 600.0
"""A session that nobody used for so long is closed."""


@dataclass(slots=True)
class Source:
    """One remote rank that this rank reads from."""

    card: RankCard
    remote: RemoteAgent
    plan: ReadPlan
    prepared: Prepared
    staged: tuple[Staged, ...]
    carried: Carried | None = None
    """What was last said of its transport."""

    def __str__(self) -> str:
        return f"rank (tp {self.card.tp_rank}, pp {self.card.pp_rank})"


class Turns:
    """So many at once; the others in the order they came."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: deque[asyncio.Future[None]] = deque()

    def take_now(self) -> bool:
        """Whether there was one, and nobody waits for it."""
        if not self._free:
            return False
        self._free -= 1
        return True

    def queue(self) -> asyncio.Future[None]:
        """Done when it is one's turn. Who ends it otherwise has given up."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        return turn

    def give_back(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


@dataclass(slots=True, eq=False)
class Session:
    """One other engine, as of `welcome.epoch`."""

    engine_id: str
    client: PeerClient
    welcome: Welcome
    last_used: float
    sources: asyncio.Task[list[Source]] | None = None
    closed: bool = False
    users: int = 0
    turns: Turns = field(default_factory=lambda: Turns(READS_AT_ONCE))
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nobody uses the session; only then may it be let go."""

    def __post_init__(self) -> None:
        self.idle.set()

    def hold(self) -> None:
        """The session stays usable until `let_go`, even when it is closed to new users."""
        self.users += 1
        self.idle.clear()

    def let_go(self) -> None:
        assert self.users > 0
        self.users -= 1
        if self.users == 0:
            self.idle.set()

    def open_sources(self) -> list[Source]:
        """The remote ranks whose memory is open here now."""
        task = self.sources
        done = task is not None and task.done() and not task.cancelled()
        return task.result() if done and task and task.exception() is None else []

    @property
    def epoch(self) -> str:
        return self.welcome.epoch

    def stale(self, now: float) -> bool:
        return self.closed or now - self.last_used > IDLE_SECONDS


@dataclass(slots=True)
class PeerBook:
    """All sessions of one rank; single flight for each peer."""

    config: Config
    control: Control
    identity: Callable[[], Identity]
    fabric: Callable[[], Fabric]
    staging: Callable[[], Staging]
    handshakes: int = 0
    refusals: int = 0
    _sessions: dict[tuple[str, str, int], asyncio.Task[Session]] = field(default_factory=dict)
    _known: set[Session] = field(default_factory=set)
    _closing: set[asyncio.Task[None]] = field(default_factory=set)
    remotes: Remotes = field(init=False)

    def __post_init__(self) -> None:
        self.remotes = Remotes(self.fabric)

    async def greet(self, engine_id: str, host: str, port: int, epoch: str) -> Session:
        """The session with an engine; a handshake when there is none or its epoch is past.

        `epoch` is the ticket's. Raises `HandshakeError`, or `PeerGoneError` when nobody answers.
        """
        while True:
            session = await self._session((engine_id, host, port), epoch)
            if not session.closed:  # else it ended while we waited
                session.last_used = time.monotonic()
                return session

    def met(self, engine_id: str, host: str, port: int, epoch: str) -> Session | None:
        """What `greet` would return without a handshake, if it would."""
        session = self.session(engine_id, host, port)
        if session is None or session.epoch != epoch:
            return None
        session.last_used = time.monotonic()
        return session

    async def _session(self, key: tuple[str, str, int], epoch: str) -> Session:
        engine_id, host, port = key
        task = self._sessions.get(key)
        if task is not None and task.done():
            known = _result(task)
            if known is None or known.closed:
                await self._close(key)
                task = self._sessions.get(key)
            elif known.epoch != epoch:
                # Either is the older one: the session's, or that of a stale ticket.
                known.hold()
                task = asyncio.create_task(self._greet_again(known, host, port))
                self._sessions[key] = task
        if task is None:
            if len(self._sessions) >= MAX_SESSIONS:
                raise HandshakeError(f"sessions with {MAX_SESSIONS} engines are open already")
            task = asyncio.create_task(self._hello(engine_id, host, port))
            self._sessions[key] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `drop` or `close`; it is not we who were cancelled
                raise PeerGoneError(f"engine {engine_id} was dropped") from None
            raise

    async def _greet_again(self, known: Session, host: str, port: int) -> Session:
        """The same session when its engine is still what it was, else a new one."""
        try:
            session = await self._hello(known.engine_id, host, port)
            if session is not known:
                self._retire(known)
            return session
        except BaseException:
            self._retire(known)
            raise
        finally:
            known.let_go()

    def _twin(self, engine_id: str, epoch: str) -> Session | None:
        """An open session with the same engine as it is now, maybe under another address."""
        for session in self._known:
            if (session.engine_id, session.epoch, session.closed) == (engine_id, epoch, False):
                return session
        return None

    async def _hello(self, engine_id: str, host: str, port: int) -> Session:
        me = self.identity()
        if engine_id == me.info.engine_id:
            raise HandshakeError(
                f"the ticket names engine {engine_id!r} at {join_address(host, port)}, which is "
                "this engine: give each engine an id of its own"
            )
        client = PeerClient(self.control, host, port)
        self.handshakes += 1
        try:
            hello = Hello(sender=me.incarnation, engine_id=engine_id, shape=me.shape)
            answer = await client.call(hello, self.config.handshake_timeout)
            if not isinstance(answer, Welcome):
                raise HandshakeError(f"{client} answered Hello with {type(answer).__name__}")
            for card in answer.ranks:
                card.layout.validate()
        except BaseException as error:
            self.refusals += isinstance(error, HandshakeError)
            await client.close()
            raise
        twin = self._twin(engine_id, answer.epoch)
        if twin is not None:
            await client.close()
            return twin
        log.info("met engine %s at %s: %d ranks", engine_id, client, len(answer.ranks))
        _log_one_sided(me, answer, engine_id)
        session = Session(
            engine_id=engine_id,
            client=client,
            welcome=answer,
            last_used=time.monotonic(),
        )
        self._known.add(session)
        return session

    async def sources(self, session: Session) -> list[Source]:
        """The remote ranks that this rank reads from, their memory opened and plans prepared."""
        if session.sources is None or (
            session.sources.done()
            and (session.sources.cancelled() or session.sources.exception() is not None)
        ):
            session.sources = asyncio.create_task(self._meet_all(session))
        return await asyncio.shield(session.sources)

    async def _meet_all(self, session: Session) -> list[Source]:
        me = self.identity()
        ranks = session.welcome.ranks
        assignments = assign(me.layout, [card.layout for card in ranks])
        found: list[Source] = []
        try:
            # What cannot be planned is refused before anybody's memory is opened.
            plans = [make_plan(me.layout, ranks[a.remote].layout, a) for a in assignments]
            for assignment, plan in zip(assignments, plans, strict=True):
                card = ranks[assignment.remote]
                remote = await self._meet(session, card, me)
                try:
                    prepared = await self.fabric().prepare(
                        remote,
                        plan.local_rows,
                        plan.remote_rows,
                        local_kind=me.layout.kind,
                        remote_kind=card.layout.kind,
                    )
                    staged = await self.staging().prepare(remote, card.layout, assignment, plan)
                except BaseException:
                    await self.remotes.let_go(remote)
                    raise
                found.append(
                    Source(card=card, remote=remote, plan=plan, prepared=prepared, staged=staged)
                )
        except BaseException:
            await self._disconnect(found)
            raise
        return found

    async def _meet(self, session: Session, card: RankCard, me: Identity) -> RemoteAgent:
        client = PeerClient(self.control, card.host, card.port)
        try:
            meet = Meet(engine_id=session.engine_id, shape=me.shape, incarnation=card.incarnation)
            answer = await client.call(meet, self.config.handshake_timeout)
        finally:
            await client.close()
        if not isinstance(answer, Met):
            raise HandshakeError(f"{client} answered Meet with {type(answer).__name__}")
        return await self.remotes.open(answer.metadata, self.config.handshake_timeout)

    def note_transport(self, session: Session, source: Source) -> Carried | None:
        """What carries the reads from a source; says so in the log when that is news."""
        carried = source.remote.carried
        if carried is not None and carried.final and carried is not source.carried:
            source.carried = carried
            where = f"reads from engine {session.engine_id}, {source}, go by {carried.transport}"
            if self.unexpected(carried):
                log.warning(
                    "%s, and expected_transport is %s: %s; `kvagent doctor --peer` says more",
                    where,
                    " or ".join(self.config.expected_transport),
                    carried.why,
                )
            else:
                rate = carried.rate / 1e9
                log.info("%s: %d bytes at %.2f GB/s", where, carried.nbytes, rate)
        return carried

    def unexpected(self, carried: Carried | None) -> bool:
        """Whether it is known to be another transport than the settings expect."""
        expected = self.config.expected_transport
        known = carried is not None and carried.final and carried.transport != UNKNOWN
        return bool(known and expected and carried and carried.transport not in expected)

    # ------------------------------------------------------------ endings

    def forget(self, session: Session) -> None:
        """Ends a session that turned out to be stale; the next fetch makes a new one."""
        self._retire(session)

    def forget_memory(self) -> None:
        """After a fence: what was opened of the peers' memory is no longer valid."""
        self.remotes.forget_all()
        for session in self._known:
            session.sources = None

    async def drop(self, engine_id: str) -> None:
        """Ends every session with an engine."""
        for key in [key for key in self._sessions if key[0] == engine_id]:
            await self._close(key)

    async def sweep(self, now: float) -> None:
        """Closes sessions that failed or that nobody used for a while."""
        for key, task in list(self._sessions.items()):
            session = _result(task)
            if task.done() and (session is None or session.stale(now)):
                await self._close(key)

    async def close(self) -> None:
        for key in list(self._sessions):
            await self._close(key)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def sessions(self) -> list[Session]:
        """Those that are open now."""
        return [session for session in self._known if not session.closed]

    def session(self, engine_id: str, host: str, port: int) -> Session | None:
        """The one that is open with an engine at an address, if any."""
        task = self._sessions.get((engine_id, host, port))
        known = _result(task) if task is not None else None
        return None if known is None or known.closed else known

    async def _close(self, key: tuple[str, str, int]) -> None:
        task = self._sessions.pop(key, None)
        if task is None:
            return
        task.cancel()
        (session,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(session, Session):
            self._retire(session)

    def _retire(self, session: Session) -> None:
        """No new users; the memory and the connection go with the last one."""
        if session.closed and session not in self._known:
            return
        session.closed = True
        self._known.discard(session)
        closing = asyncio.create_task(self._let_go(session))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _let_go(self, session: Session) -> None:
        await session.idle.wait()
        if session.sources is not None:
            session.sources.cancel()
            (sources,) = await asyncio.gather(session.sources, return_exceptions=True)
            if isinstance(sources, list):
                await self._disconnect(sources)
        await session.client.close()

    async def _disconnect(self, sources: list[Source]) -> None:
        for source in sources:
            prepared = [source.prepared, *(p for track in source.staged for p in track.prepared)]
            try:
                for each in prepared:
                    await self.fabric().release(each)
            except KVAgentError as error:  # the fabric is closed, or a newer one
                log.debug("release: %s", error)
            await self.remotes.let_go(source.remote)


def _log_one_sided(me: Identity, welcome: Welcome, engine_id: str) -> None:
    """Names the layers that only one side has; they take no part in transfers.

    With pipeline stages each rank speaks of its own layers only: it does not know the others'.
    """
    ours = set(me.layout.layers)
    theirs = {layer for card in welcome.ranks for layer in card.layout.layers}
    only_ours = sorted(ours - theirs)
    only_theirs = sorted(theirs - ours) if me.info.pp_size == 1 else []
    for layers, where in ((only_ours, me.info.engine_id), (only_theirs, engine_id)):
        if layers:
            log.warning("left out, since only engine %s has them: %s", where, ", ".join(layers))


def _result(task: asyncio.Task[Session]) -> Session | None:
    """The session that a handshake made, if it has."""
    done = task.done() and not task.cancelled() and task.exception() is None
    return task.result() if done else None

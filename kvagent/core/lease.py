"""The producer's table of offers: who may read which blocks, and until when.

Theory of operation. An **offer** makes a lease on the blocks of one request. A **claim** binds it
to one fetch of one consumer, which then **renews** it until it **completes**. A short fetch only
completes: it would be over before its claim was answered. The blocks go back
to the engine (`take_finished`) when the lease ends, for whatever reason, and only then. The table
answers `complete` with `HELD` only while the lease never lapsed: since the blocks were held all
that time, every byte that was read before the question is right. That is the whole fence.

    offered --claim--> claimed --complete--> completed   (short: offered --complete--> completed)
       |                  |
       +------------------+--> expired | released | cancelled | revoked

An offer of blocks that a fetch still writes is `refused` at once (see `kvagent.core.ledger`).
An ended lease stays as a tombstone, so that a second delivery is answered as the first was, and a
late one is told why. A claim that overtakes its offer (they travel on different sockets) is parked
for a moment, and a release is remembered as long; both and the tombstones are bounded, so that no
stranger can make the table grow. A **deferred** ticket was given away before its bytes were there:
its offer comes when they are, and its fetch reads nothing before the claim is granted. Times are
the caller's `now`, in seconds of any monotonic clock.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from kvagent.core.ledger import BlockState, Holding, Ledger
from kvagent.errors import BlockInUseError

__all__ = ["LeaseState", "LeaseTable", "Verdict", "ticket_digest"]


class LeaseState(str, Enum):
    OFFERED = "offered"
    CLAIMED = "claimed"
    COMPLETED = "completed"
    EXPIRED = "expired"
    RELEASED = "released"
    CANCELLED = "cancelled"
    REVOKED = "revoked"
    REFUSED = "refused"


class Verdict(str, Enum):
    """The answer to every question about a lease. All but `HELD` and `RELEASED` mean: not good; by
    `COMING` nothing is decided."""

    HELD = "held"  # claim: it is yours; complete: every byte you read is right
    RELEASED = "released"  # it ended by a release
    UNKNOWN = "unknown"  # never offered here, or so long ago that it was forgotten
    FORBIDDEN = "forbidden"  # the token is not the ticket's
    MISMATCH = "mismatch"  # the ticket's block ids or tokens are not the offer's
    USED = "used"  # another fetch holds or held it
    EXPIRED = "expired"  # the lease ran out and the blocks went back
    CANCELLED = "cancelled"  # the producer's engine cancelled the request
    REVOKED = "revoked"  # the producer's memory is not what it was
    REFUSED = "refused"  # the offer named blocks that were still being written
    QUIESCED = "quiesced"  # the producer's engine starts no transfer for the moment
    COMING = "coming"  # claim: the bytes are not there yet; ask again


_ENDED = {
    LeaseState.COMPLETED: Verdict.USED,
    LeaseState.EXPIRED: Verdict.EXPIRED,
    LeaseState.RELEASED: Verdict.RELEASED,
    LeaseState.CANCELLED: Verdict.CANCELLED,
    LeaseState.REVOKED: Verdict.REVOKED,
    LeaseState.REFUSED: Verdict.REFUSED,
}


def ticket_digest(blocks: Sequence[bytes], num_tokens: int, deferred: bool = False) -> bytes:
    """32 bytes that stand for what a ticket offers: its tokens and the blocks that hold them, one
    int32 string per cache group.

    `deferred`: its bytes may not be there before its claim is granted. Who is not told so, and
    reads at once, claims with another digest and is refused.
    """
    digest = hashlib.sha256(num_tokens.to_bytes(8, "little"))
    for group in blocks:
        digest.update(len(group).to_bytes(8, "little"))
        digest.update(group)
    if deferred:
        digest.update(b"deferred")
    return digest.digest()


@dataclass(slots=True)
class Lease:
    transfer_id: str
    token: bytes
    request_id: str
    digest: bytes
    expires_at: float
    state: LeaseState = LeaseState.OFFERED
    holder: str = ""
    consumer: str = ""
    deferred: bool = False
    reading: bool = False
    """False also while a consumer only holds it."""
    quieted: bool = False
    """The engine was quiesced while nobody was known to read it: what was read may be of that time,
    in which its bytes were the engine's to change."""
    holding: Holding | None = None

    @property
    def live(self) -> bool:
        return self.state in (LeaseState.OFFERED, LeaseState.CLAIMED)


@dataclass(slots=True, frozen=True)
class ParkedClaim:
    token: bytes
    fetch_id: str
    digest: bytes
    consumer: str
    until: float
    reading: bool
    begun: bool


class LeaseTable:
    """All leases of one engine; lives at its leader. Not thread-safe."""

    def __init__(
        self,
        *,
        lease_seconds: float,
        ledger: Ledger | None = None,
        park_seconds: float = 2.0,
        tombstone_seconds: float = 300.0,
        max_parked: int = 1024,
        max_tombstones: int = 65536,
    ) -> None:
        self.lease_seconds = lease_seconds
        self.park_seconds = park_seconds
        self.tombstone_seconds = tombstone_seconds
        self.max_parked = max_parked
        self.max_tombstones = max_tombstones
        self._quiesced = False
        self._ledger = ledger or Ledger()
        self._live: dict[str, Lease] = {}
        self._tombstones: OrderedDict[str, tuple[Lease, float]] = OrderedDict()
        self._parked: dict[str, ParkedClaim] = {}
        self._early: dict[tuple[str, bytes], float] = {}
        """Releases that overtook their offer, by (transfer id, token): when they are forgotten."""
        self._by_request: dict[str, set[str]] = {}
        self._finished: set[str] = set()
        self._ended_offers: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()

    def __len__(self) -> int:
        """Leases that are live."""
        return len(self._live)

    @property
    def quiesced(self) -> bool:
        """While it is, nothing is claimed that was not; and afterwards nothing is good that may
        have been read meanwhile."""
        return self._quiesced

    @quiesced.setter
    def quiesced(self, on: bool) -> None:
        if self._quiesced and not on:
            for lease in self._live.values():
                lease.quieted |= not lease.reading
        self._quiesced = on

    # ------------------------------------------------------------ the engine's side

    def offer(
        self,
        now: float,
        transfer_id: str,
        token: bytes,
        request_id: str,
        blocks: Sequence[bytes],
        num_tokens: int,
        deferred: bool = False,
    ) -> None:
        """A new lease; `answer_parked` comes next. `deferred` as in `ticket_digest`.

        A second offer of the same transfer changes nothing. Raises `BlockInUseError` when a block
        is still being written; the lease has ended then.
        """
        if transfer_id in self._live or transfer_id in self._tombstones:
            return
        lease = Lease(
            transfer_id=transfer_id,
            token=token,
            request_id=request_id,
            digest=ticket_digest(blocks, num_tokens, deferred),
            deferred=deferred,
            expires_at=now + self.lease_seconds,
        )
        self._live[transfer_id] = lease
        self._by_request.setdefault(request_id, set()).add(transfer_id)
        self._finished.discard(request_id)  # an earlier lease of it ended, and nobody was told yet
        try:
            lease.holding = self._ledger.lend([np.frombuffer(group, "<i4") for group in blocks])
        except BlockInUseError:
            self._end(now, lease, LeaseState.REFUSED)
            raise
        if self._early.pop((transfer_id, token), now) > now:
            self._end(now, lease, LeaseState.RELEASED)

    def answer_parked(self, now: float, transfer_id: str) -> tuple[str, Verdict] | None:
        """`(fetch_id, verdict)` when a claim waited for this offer."""
        parked = self._parked.pop(transfer_id, None)
        if parked is None:
            return None
        verdict = self.claim(
            now,
            transfer_id,
            parked.token,
            parked.fetch_id,
            parked.digest,
            parked.consumer,
            parked.reading,
            parked.begun,
        )
        assert verdict is not None  # the offer is there: nothing to park
        return parked.fetch_id, verdict

    def cancel(self, now: float, request_id: str) -> bool:
        """Ends every lease of a request; its blocks may be reused at once, since whoever reads
        them still is told `CANCELLED`. False when there is none."""
        transfers = list(self._by_request.get(request_id, ()))
        for transfer_id in transfers:
            self._end(now, self._live[transfer_id], LeaseState.CANCELLED)
        return bool(transfers)

    def revoke_all(self, now: float) -> None:
        """The memory behind the leases is not what it was: none of them is good any more."""
        for lease in list(self._live.values()):
            self._end(now, lease, LeaseState.REVOKED)

    def drop_consumer(self, now: float, engine_id: str) -> None:
        """An engine is gone: the leases that it holds end."""
        for lease in [lease for lease in self._live.values() if lease.consumer == engine_id]:
            self._end(now, lease, LeaseState.REVOKED)

    def take_finished(self) -> set[str]:
        """Requests whose blocks may be reused, each exactly once."""
        finished, self._finished = self._finished, set()
        return finished

    def take_ended(self) -> Counter[str]:
        """How many leases of each request have ended since the last call."""
        ended, self._ended_offers = self._ended_offers, Counter()
        return ended

    # ------------------------------------------------------------ the consumer's side

    def claim(
        self,
        now: float,
        transfer_id: str,
        token: bytes,
        fetch_id: str,
        digest: bytes,
        consumer: str = "",
        reading: bool = True,
        begun: bool = True,
    ) -> Verdict | None:
        """Binds the lease to `fetch_id` of engine `consumer`, which is `reading` or only holds it.
        `begun`: it may have read something already.

        None: parked, the answer comes from `answer_parked` or `sweep`.
        """
        lease = self._find(now, transfer_id)
        if lease is None:
            if transfer_id not in self._parked and len(self._parked) < self.max_parked:
                until = now + self.park_seconds
                self._parked[transfer_id] = ParkedClaim(
                    token, fetch_id, digest, consumer, until, reading, begun
                )
            parked = self._parked.get(transfer_id)
            same = parked is not None and parked.fetch_id == fetch_id
            return None if same else Verdict.UNKNOWN
        if not hmac.compare_digest(lease.token, token):
            return Verdict.FORBIDDEN
        if not lease.live:
            return _ENDED[lease.state]
        if lease.holder and lease.holder != fetch_id:
            return Verdict.USED
        if lease.digest != digest:
            return Verdict.MISMATCH
        if reading and not lease.reading and (self._quiesced or (lease.quieted and begun)):
            return Verdict.QUIESCED
        lease.holder, lease.consumer = fetch_id, consumer
        lease.reading = lease.reading or reading
        lease.state = LeaseState.CLAIMED
        if lease.holding is not None:
            lease.holding.move(BlockState.CLAIMED)
        lease.expires_at = now + self.lease_seconds
        return Verdict.HELD

    def renew(self, now: float, transfer_id: str, fetch_id: str) -> Verdict:
        """Another `lease_seconds` from now, for the holder only."""
        lease = self._find(now, transfer_id)
        if lease is None:
            return Verdict.UNKNOWN
        if lease.holder != fetch_id:
            return Verdict.USED
        if not lease.live:
            return _ENDED[lease.state]
        lease.expires_at = now + self.lease_seconds
        return Verdict.HELD

    def complete(
        self,
        now: float,
        transfer_id: str,
        token: bytes,
        fetch_id: str,
        digest: bytes,
        consumer: str = "",
    ) -> Verdict:
        """All reads have ended: `HELD` if the lease never lapsed, and then it ends here. A fetch
        that has not claimed it does so by this; not of a deferred ticket."""
        lease = self._find(now, transfer_id)
        if lease is None:
            return Verdict.UNKNOWN
        if not hmac.compare_digest(lease.token, token):
            return Verdict.FORBIDDEN
        if lease.live and not lease.holder and not lease.deferred:
            verdict = self.claim(now, transfer_id, token, fetch_id, digest, consumer)
            assert verdict is not None  # the offer is there: nothing to park
            if verdict is not Verdict.HELD:
                return verdict
        if lease.holder != fetch_id:
            return Verdict.USED if lease.holder else _ENDED.get(lease.state, Verdict.UNKNOWN)
        if lease.live and lease.digest != digest:
            return Verdict.MISMATCH
        if lease.live and (self._quiesced or lease.quieted) and not lease.reading:
            return Verdict.QUIESCED
        if lease.live:
            self._end(now, lease, LeaseState.COMPLETED)
            return Verdict.HELD
        return Verdict.HELD if lease.state is LeaseState.COMPLETED else _ENDED[lease.state]

    def release(self, now: float, transfer_id: str, token: bytes, fetch_id: str) -> Verdict:
        """The consumer will not read (any more). `fetch_id` is empty when it never claimed."""
        parked = self._parked.get(transfer_id)
        if parked is not None and parked.fetch_id == fetch_id:
            del self._parked[transfer_id]
        lease = self._find(now, transfer_id)
        if lease is None:
            if len(self._early) < self.max_parked:
                self._early[transfer_id, token] = now + self.park_seconds
            return Verdict.UNKNOWN
        if not hmac.compare_digest(lease.token, token):
            return Verdict.FORBIDDEN
        if lease.holder and lease.holder != fetch_id:
            return Verdict.USED
        if lease.live:
            self._end(now, lease, LeaseState.RELEASED)
        return _ENDED[lease.state]

    # ------------------------------------------------------------ time

    def sweep(self, now: float, coming: Container[str] = ()) -> list[str]:
        """Ends what ran out. Returns the fetch ids of parked claims whose offer never came; those
        of the transfers in `coming` go on waiting.

        Every lease is looked at: expiry order is not insertion order once leases are renewed.
        """
        for lease in [lease for lease in self._live.values() if now >= lease.expires_at]:
            self._end(now, lease, LeaseState.EXPIRED)
        for key in [key for key, until in self._early.items() if now >= until]:
            del self._early[key]
        late = [
            key for key, claim in self._parked.items() if now >= claim.until and key not in coming
        ]
        answers = [self._parked.pop(key).fetch_id for key in late]
        while self._tombstones:
            _, forget_at = next(iter(self._tombstones.values()))
            if now < forget_at and len(self._tombstones) <= self.max_tombstones:
                break
            self._tombstones.popitem(last=False)
        return answers

    # ------------------------------------------------------------ for people

    def counts(self) -> dict[str, int]:
        """Leases by live state, and the sizes of the bounded tables."""
        states = Counter(lease.state.value for lease in self._live.values())
        return {
            "offered": states["offered"],
            "claimed": states["claimed"],
            "parked": len(self._parked),
            "tombstones": len(self._tombstones),
        }

    def live(self) -> Iterable[Lease]:
        return self._live.values()

    # ------------------------------------------------------------ inside

    def _find(self, now: float, transfer_id: str) -> Lease | None:
        lease = self._live.get(transfer_id)
        if lease is None:
            entry = self._tombstones.get(transfer_id)
            return entry[0] if entry else None
        if now >= lease.expires_at:  # lapsed, though no sweep has come by yet
            self._end(now, lease, LeaseState.EXPIRED)
        return lease

    def _end(self, now: float, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        if lease.holding is not None:
            lease.holding.move(BlockState.FREE)
            lease.holding = None
        self.ended[state.value] += 1
        del self._live[lease.transfer_id]
        self._tombstones[lease.transfer_id] = (lease, now + self.tombstone_seconds)
        if len(self._tombstones) > self.max_tombstones:
            self._tombstones.popitem(last=False)
        self._ended_offers[lease.request_id] += 1
        transfers = self._by_request[lease.request_id]
        transfers.discard(lease.transfer_id)
        if not transfers:
            del self._by_request[lease.request_id]
            self._finished.add(lease.request_id)

"""Every message of both protocols, as two tagged unions.

`Local`: between an engine's processes and their sidecar, over the unix socket.
`Peer`: between sidecars, over ZMQ; each one is a call (answered by the message named beside it).

Durations travel, never times. Block ids travel as little-endian int32 strings, one per cache
group. Everything is idempotent: a second delivery is answered as the first one was.
"""

from __future__ import annotations

from typing import Annotated, get_args

import msgspec

from kvagent.core.compare import Difference, EngineShape
from kvagent.core.layout import RankLayout, TensorView
from kvagent.core.output import KVConnectorOutput
from kvagent.core.specs import CacheSpec, WorkerInfo
from kvagent.core.stats import ReadStats
from kvagent.core.topology import EngineTransferInfo
from kvagent.fabric.base import PeerMetadata
from kvagent.fabric.place import Place
from kvagent.wire.codec import Codec

PROTOCOL = 1
"""Version of the peer protocol; it stands in the clear before every message."""

MAX_LOCAL_BYTES = 32 << 20
MAX_PEER_BYTES = 16 << 20


Id = Annotated[str, msgspec.Meta(max_length=256)]
"""Names of engines, transfers, incarnations, hosts: nothing that a peer can make long."""
FetchId = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""Of a fetch that claims: nobody holds a lease without a name."""
Secret = Annotated[bytes, msgspec.Meta(max_length=64)]
"""Tokens and digests."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
"""Of tokens."""
Words = Annotated[str, msgspec.Meta(max_length=1 << 16)]
"""Text for people."""


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Base of all messages."""


# ---------------------------------------------------------------- engine worker <-> sidecar


class Join(Message, frozen=True, tag="join"):
    """A worker process says who it is. `keep_cache`: it goes on with the cache that its
    predecessor left here; otherwise it starts afresh."""

    info: WorkerInfo
    keep_cache: bool = False


class JoinAccepted(Message, frozen=True, tag="join_accepted"):
    """`endpoint` is this sidecar's advertised control address, "host:port"."""

    endpoint: str
    version: str


class Allocate(Message, frozen=True, tag="allocate"):
    """The sidecar shall own the cache memory; `specs` by layer name."""

    specs: dict[str, CacheSpec]
    num_blocks: int
    gpu: Id = ""
    """The uuid of the GPU whose memory it shall be; empty: host memory."""


class GpuMemory(Message, frozen=True):
    """Memory that the sidecar owns on GPU `gpu`: the legacy CUDA IPC handle of its allocation and
    the place in it. Between threads of one process, whose handles CUDA does not open, the number
    under which the tensor was handed over."""

    gpu: Id
    handle: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    offset: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)] = 0
    handed: int = 0


class Allocated(Message, frozen=True, tag="allocated"):
    """Comes with one file descriptor of `nbytes` bytes, or with `memory` on a GPU; `views` say
    where each tensor lies."""

    nbytes: int
    views: dict[str, TensorView]
    pages: str
    memory: GpuMemory | None = None


class SharedRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Engine-owned memory: `nbytes` from `offset` of the descriptor sent along, or, between
    threads of one process, the plain `address`, of GPU `device` unless that is negative."""

    nbytes: int
    offset: int = 0
    address: int = 0
    device: int = -1


class Register(Message, frozen=True, tag="register"):
    """The engine owns the cache memory; comes with one descriptor per range (none embedded)."""

    specs: dict[str, CacheSpec]
    num_blocks: int
    ranges: tuple[SharedRange, ...]
    views: dict[str, TensorView]


class Registered(Message, frozen=True, tag="registered"):
    pass


# ---------------------------------------------------------------- scheduler <-> leader sidecar


class Attach(Message, frozen=True, tag="attach"):
    """A scheduler takes over this connection; answered by `Waiting`s and then `Ready`."""


class Waiting(Message, frozen=True, tag="waiting"):
    """Not ready, and why."""

    reason: str


class Ready(Message, frozen=True, tag="ready"):
    """All ranks are there. Sent again when `epoch` changes: tickets must carry the newest."""

    engine_id: str
    host: str
    port: int
    tp_size: int
    epoch: str
    lease_seconds: float
    orphan_seconds: float = 0.0
    """After this sidecar's death other ranks' sidecars may write for so long."""
    deferred: bool = False
    """Every ticket of this engine is given away before its bytes are there to be read."""


class Offer(Message, frozen=True, tag="offer"):
    """`event`: the number under which a CUDA event was handed over, which has to pass first; 0:
    none. `deferred`: the ticket says so."""

    request_id: str
    transfer_id: str
    token: bytes
    blocks: tuple[bytes, ...]
    num_tokens: Count
    event: int = 0
    deferred: bool = False


class Fetch(Message, frozen=True, tag="fetch"):
    """`remote_blocks` hold the tokens from 0, `local_blocks` too; `start_token` is the first
    one to read. `traceparent` is the ticket's, or empty."""

    request_id: str
    engine_id: str
    host: str
    port: int
    epoch: str
    transfer_id: str
    token: bytes
    num_tokens: Count
    remote_blocks: tuple[bytes, ...]
    local_blocks: tuple[bytes, ...]
    start_token: Count = 0
    traceparent: str = ""
    deferred: bool = False


class Hold(Message, frozen=True, tag="hold"):
    """A fetch of this ticket will come, when the request has blocks: keep its lease alive."""

    engine_id: str
    host: str
    port: int
    epoch: str
    transfer_id: str
    token: bytes
    num_tokens: Count
    remote_blocks: tuple[bytes, ...]
    deferred: bool = False


class ReleaseTicket(Message, frozen=True, tag="release_ticket"):
    engine_id: str
    host: str
    port: int
    transfer_id: str
    token: bytes


class Cancel(Message, frozen=True, tag="cancel"):
    request_id: str


class Drain(Message, frozen=True, tag="drain"):
    timeout: float


class Drained(Message, frozen=True, tag="drained"):
    """`left`: requests that had to be failed because the time ran out."""

    left: tuple[str, ...] = ()


class Quiesce(Message, frozen=True, tag="quiesce"):
    """Start no transfer until `Resume`; answered by `Quiesced` when none is under way."""

    timeout: float


class Quiesced(Message, frozen=True, tag="quiesced"):
    """`left`: requests that were still being read or written when the time ran out."""

    left: tuple[str, ...] = ()


class Resume(Message, frozen=True, tag="resume"):
    pass


class DropPeer(Message, frozen=True, tag="drop_peer"):
    engine_id: str


class Report(Message, frozen=True, tag="report"):
    """One output for rank 0; delivered again to the next scheduler until acknowledged."""

    seq: int
    output: KVConnectorOutput
    offers: dict[str, int] = {}
    """How many offers of a request have ended since the report before: one that was made while
    this was on its way is not among them."""


class Ack(Message, frozen=True, tag="ack"):
    """Everything up to `seq` has been taken by `step()`."""

    seq: int


class Failed(Message, frozen=True, tag="failed"):
    """The answer to a call that failed; `code` is the name of the error class."""

    code: str
    message: str


Local = (
    Join
    | JoinAccepted
    | Allocate
    | Allocated
    | Register
    | Registered
    | Attach
    | Waiting
    | Ready
    | Offer
    | Fetch
    | Hold
    | ReleaseTicket
    | Cancel
    | Drain
    | Drained
    | Quiesce
    | Quiesced
    | Resume
    | DropPeer
    | Report
    | Ack
    | Failed
)

local_codec: Codec[Local] = Codec(Local, MAX_LOCAL_BYTES)


# ---------------------------------------------------------------- sidecar <-> sidecar


class RankCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One rank of an engine: where its sidecar listens and what its memory holds.

    `incarnation` changes whenever the sidecar, its fabric or its memory is a new one. `mirrored`:
    what is read is a mirror of the cache, which lies on a GPU; all ranks of an engine agree on it.
    """

    tp_rank: int
    pp_rank: int
    host: Id
    port: int
    incarnation: Id
    layout: RankLayout
    mirrored: bool = False


class JoinLeader(Message, frozen=True, tag="join_leader"):
    """Follower -> leader, once a second: it is also the sign of life. -> `Welcomed`.

    `said_at`: nanoseconds of a clock of the sender's, since a late one must not be taken for news.
    `leader`: incarnation of the leader whose parts are taken here, from its last `Welcomed`.
    `reading_for`: those whose parts are being read here.
    `attached`: the rank's worker process is there. When it is not, its cache is what a dead
    engine left, and no part of a new one.
    """

    engine_id: Id
    attached: bool
    shape: EngineShape
    card: RankCard
    said_at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
    leader: Id = ""
    reading_for: Annotated[tuple[Id, ...], msgspec.Meta(max_length=64)] = ()


class Welcomed(Message, frozen=True, tag="welcomed"):
    leader: Id


class Who(Message, frozen=True, tag="who"):
    """Anyone -> sidecar: who is there? It opens nothing, and `kvagent doctor` starts with it.
    -> `Presence`."""


class Presence(Message, frozen=True, tag="presence"):
    """`shape` is what a `Hello` to this engine must agree with; it is there when one would be
    answered, and otherwise `not_ready` says why not. `rank` is the place in the engine."""

    version: Id
    place: Place
    engine_id: Id = ""
    rank: int = 0
    shape: EngineShape | None = None
    not_ready: Words = ""


class Hello(Message, frozen=True, tag="hello"):
    """Consumer rank -> producer leader. `sender` is the caller's incarnation, so that dialling
    oneself is noticed. -> `Welcome` or `Refused`."""

    sender: Id
    engine_id: Id
    shape: EngineShape


LeaseSeconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class Welcome(Message, frozen=True, tag="welcome"):
    epoch: Id
    info: EngineTransferInfo
    ranks: tuple[RankCard, ...]
    lease_seconds: LeaseSeconds
    """Of its tickets."""


class Meet(Message, frozen=True, tag="meet"):
    """Consumer rank -> producer rank, after `Welcome`. -> `Met` or `Refused`."""

    engine_id: Id
    shape: EngineShape
    incarnation: Id


class Met(Message, frozen=True, tag="met"):
    """What opens the memory: only ever sent to who passed the same checks as in `Hello`."""

    metadata: PeerMetadata


class Refused(Message, frozen=True, tag="refused"):
    """`differences` names each field that does not fit, with both values."""

    code: Id
    message: Words
    differences: tuple[Difference, ...] = ()


class Claim(Message, frozen=True, tag="claim"):
    """Consumer leader -> producer leader: "fetch `fetch_id` will read transfer `transfer_id`".

    `engine_id` is the consumer's. `digest` is of the blocks and tokens that the ticket named: one
    that was altered on its way is refused before its bytes are used. -> `Verdict`.
    """

    transfer_id: Id
    token: Secret
    fetch_id: FetchId
    engine_id: Id
    digest: Secret
    reading: bool = True
    """False: the lease is only to be held, for a fetch that is to come."""
    begun: bool = True
    """Something may have been read before this was answered."""


MAX_RENEWALS = 4096
"""Leases in one `Renew`."""


class LeaseRef(msgspec.Struct, frozen=True, array_like=True):
    transfer_id: Id
    fetch_id: FetchId


class Renew(Message, frozen=True, tag="renew"):
    """All leases that this consumer holds at the peer. -> `Renewed`, in the same order."""

    leases: Annotated[tuple[LeaseRef, ...], msgspec.Meta(max_length=MAX_RENEWALS)]


class Renewed(Message, frozen=True, tag="renewed"):
    verdicts: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_RENEWALS)]


class Completion(msgspec.Struct, frozen=True, array_like=True):
    """ "All my ranks have finished reading this": the fence. Held means valid.

    A short fetch never claims: then it is claimed and completed at once. `digest` and the message's
    `engine_id` are as in `Claim`.
    """

    transfer_id: Id
    token: Secret
    fetch_id: FetchId
    digest: Secret


MAX_COMPLETIONS = 512


class Complete(Message, frozen=True, tag="complete"):
    """Consumer leader -> producer leader, of what ended at the same time. -> `Completed`."""

    engine_id: Id
    leases: Annotated[tuple[Completion, ...], msgspec.Meta(max_length=MAX_COMPLETIONS)]


class Completed(Message, frozen=True, tag="completed"):
    """The verdicts on its leases, in their order."""

    epoch: Id
    verdicts: Annotated[tuple[Id, ...], msgspec.Meta(max_length=MAX_COMPLETIONS)]


class Release(Message, frozen=True, tag="release"):
    """ "I will not read it": empty `fetch_id` when it was never claimed. -> `Verdict`."""

    transfer_id: Id
    token: Secret
    fetch_id: Id = ""


class Verdict(Message, frozen=True, tag="verdict"):
    """What the producer's table says of a lease; see `kvagent.core.lease.Verdict`."""

    verdict: Id
    epoch: Id
    lease_seconds: LeaseSeconds


class Part(Message, frozen=True, tag="part"):
    """Leader -> follower: your share of a fetch; sent again until it is done. -> `PartState`.

    `part_id` is known inside the engine only: nobody who was told the fetch's id can end it.
    """

    part_id: Id
    leader: Id
    """Its incarnation: a part does not outlive its leader by long."""
    engine_id: Id
    host: Id
    port: int
    epoch: Id
    num_tokens: Count
    remote_blocks: tuple[bytes, ...]
    local_blocks: tuple[bytes, ...]
    start_token: Count


class PartState(Message, frozen=True, tag="part_state"):
    done: bool
    failure: Words = ""
    stats: ReadStats | None = None


class PartDone(Message, frozen=True, tag="part_done"):
    """Follower -> leader, as soon as a part is terminal. -> `Ok`."""

    engine_id: Id
    tp_rank: int
    pp_rank: int
    part_id: Id
    failure: Words = ""
    stats: ReadStats | None = None


class AbortPart(Message, frozen=True, tag="abort_part"):
    """Leader -> follower: post nothing more; `fence`: end what is in flight too. -> `PartState`."""

    part_id: Id
    fence: bool = False


class CopyDown(Message, frozen=True, tag="copy_down"):
    """Leader -> follower with a mirror: have these blocks copied into it. -> `Ok`, when they are;
    asking again copies again, the same bytes."""

    leader: Id
    blocks: tuple[bytes, ...]
    num_tokens: Count


class Drop(Message, frozen=True, tag="drop"):
    """Leader -> follower: that engine is gone. -> `Ok`."""

    engine_id: Id


class Ok(Message, frozen=True, tag="ok"):
    pass


Peer = (
    JoinLeader
    | Welcomed
    | Who
    | Presence
    | Hello
    | Welcome
    | Meet
    | Met
    | Refused
    | Claim
    | Renew
    | Renewed
    | Complete
    | Completed
    | Release
    | Verdict
    | Part
    | PartState
    | PartDone
    | AbortPart
    | CopyDown
    | Drop
    | Ok
)

KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(Peer))
"""Names of the messages between sidecars."""

peer_codec: Codec[Peer] = Codec(Peer, MAX_PEER_BYTES)

MAX_QUESTION_BYTES = 1 << 20
"""Only a `Part`, with its block ids, may be a longer question: decoding holds up the loop."""

part_codec: Codec[Part] = Codec(Part, MAX_PEER_BYTES)


def decode_question(data: bytes) -> Peer:
    """What a peer asks; `ProtocolError` when it is none, or too long."""
    codec = peer_codec if len(data) <= MAX_QUESTION_BYTES else part_codec
    return codec.decode(data)

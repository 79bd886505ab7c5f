"""The first contact of two engines: its messages, their bytes and what they cost both leaders.

It happens once for each pair of engines that have anything to do with one another, and is no part
of the cost of a request. The engines here have 8 tensor-parallel ranks of llama-3.1-70b each.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache

from kvagent.bench.shapes import SHAPES
from kvagent.core.compare import EngineShape, differences, engine_shape
from kvagent.core.layout import MemoryRange, RankLayout, allocate, build_layout
from kvagent.core.plan import assign, make_plan
from kvagent.core.specs import ModelInfo, WorkerInfo
from kvagent.core.topology import EngineTransferInfo, TransferTopology
from kvagent.fabric.base import PeerMetadata
from kvagent.wire.messages import (
    Hello,
    JoinLeader,
    Meet,
    Met,
    Peer,
    RankCard,
    Welcome,
    Welcomed,
    decode_question,
    peer_codec,
)
from kvagent.wire.peer import HEAD

__all__ = ["BLOCKS", "RANKS", "Contact", "model_layout", "signs_of_life"]

RANKS = 8
BLOCKS = 8192
INCARNATION = "0123456789abcdef0123456789abcdef"
METADATA_BYTES = 600
MODEL = ModelInfo(name="llama-3.1-70b", num_layers=80)


class Backend:
    """Shape of an attention backend's cache, as `TransferTopology` asks for it."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size, num_kv_heads, head_size)


@cache
def _rank(rank: int) -> tuple[RankLayout, EngineShape]:
    info = WorkerInfo(engine_id="e", tp_rank=rank, tp_size=RANKS, model=MODEL)
    specs = SHAPES[MODEL.name].specs(16)
    nbytes, views = allocate(specs, info, BLOCKS)
    memory = (MemoryRange(0x7F00_0000_0000, nbytes),)
    return build_layout(specs, info, views, memory, BLOCKS), engine_shape(MODEL, specs)


def model_layout(rank: int) -> RankLayout:
    return _rank(rank)[0]


def topologies(engine_id: str) -> list[TransferTopology]:
    """Of every rank of an engine."""
    return [
        TransferTopology(
            tp_rank=rank,
            tp_size=RANKS,
            block_size=16,
            engine_id=engine_id,
            is_mla=False,
            is_mamba=False,
            total_num_kv_heads=RANKS,
            attn_backends=(Backend,),
        )
        for rank in range(RANKS)
    ]


def _card(rank: int) -> RankCard:
    return RankCard(
        tp_rank=rank,
        pp_rank=0,
        host="10.0.0.1",
        port=7100 + rank,
        incarnation=INCARNATION,
        layout=model_layout(rank),
    )


class Contact:
    """Measures one contact for real; all others are the same."""

    def __init__(self) -> None:
        self.info = EngineTransferInfo(
            remote_tp_size=RANKS,
            remote_block_len=2 * 16 * 128 * 2,
            remote_block_size=16,
            remote_physical_blocks_per_logical=1,
            remote_total_num_kv_heads=RANKS,
        )
        self.messages: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By side: the producer's leader, and one rank of the consumer."""

    def meet(self, ranks: Sequence[TransferTopology], engine_id: str) -> None:
        """What `TransferTopology` does at each of the consumer's ranks."""
        for topology in ranks:
            topology.register_remote_engine(engine_id, self.info)
            assert topology.read_ranks(engine_id)

    def measure(self) -> Contact:
        """All messages of one contact, encoded and decoded, and one rank's plan."""
        shape = _rank(0)[1]
        cards = tuple(_card(rank) for rank in range(RANKS))
        metadata = PeerMetadata(
            agent="prefill-0/0.0/serve",
            blob=bytes(METADATA_BYTES),
            digest=bytes(32),
            probe_address=0x7F00_0000_0000,
            probe_digest=bytes(32),
            options={"nixl": "1.5"},
        )
        for rank in range(RANKS):
            hello = Hello(sender=INCARNATION, engine_id="prefill-0", shape=shape)
            self._send("consumer rank", "producer leader", hello, question=True)
            begin = time.thread_time()
            assert not tuple(differences(shape, hello.shape, common=False))
            self.seconds["producer leader"] += time.thread_time() - begin
            welcome = Welcome(
                epoch="0123456789abcdef.1", info=self.info, ranks=cards, lease_seconds=30.0
            )
            self._send("producer leader", "consumer rank", welcome, question=False)
            begin = time.thread_time()
            layouts = [card.layout for card in cards]
            for layout in layouts:
                layout.validate()
            assignments = assign(layouts[rank], layouts)
            for each in assignments:
                make_plan(layouts[rank], layouts[each.remote], each)
            self.seconds["consumer rank"] += time.thread_time() - begin
            for _ in assignments:
                meet = Meet(engine_id="prefill-0", shape=shape, incarnation=INCARNATION)
                self._send("consumer rank", "producer rank", meet, question=True)
                met = Met(metadata=metadata)
                self._send("producer rank", "consumer rank", met, question=False)
        self.seconds["consumer rank"] /= RANKS
        return self

    def _send(self, sender: str, receiver: str, message: Peer, *, question: bool) -> None:
        begin = time.thread_time()
        data = peer_codec.encode(message)
        middle = time.thread_time()
        decode = decode_question if question else peer_codec.decode
        decode(data)
        self.seconds[sender] += middle - begin
        self.seconds[receiver] += time.thread_time() - middle
        kind = str(message.__struct_config__.tag)
        self.messages[kind] += 1
        self.bytes[kind] += len(data) + HEAD.size


def signs_of_life() -> tuple[int, int]:
    """Messages and bytes per second at a leader that has nothing to do: its followers'."""
    shape = _rank(0)[1]
    join = JoinLeader(said_at=1, engine_id="decode-0", attached=True, shape=shape, card=_card(1))
    welcomed = Welcomed(leader=INCARNATION)
    both = [len(peer_codec.encode(message)) + HEAD.size for message in (join, welcomed)]
    return 2 * (RANKS - 1), (RANKS - 1) * sum(both)

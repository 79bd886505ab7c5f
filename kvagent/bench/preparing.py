"""What is to be done before the first byte moves: once for a peer, and once for a fetch.

`python -m kvagent.bench.preparing LAYERS BLOCKS FETCHED` prints both as JSON: a process of its own,
since it counts memory and loads NIXL.
"""

from __future__ import annotations

import ctypes
import mmap
import statistics
import sys
import time
import tracemalloc
import uuid

import msgspec
import numpy as np

from kvagent.bench.prepared import Preparing
from kvagent.core.layout import MemoryRange, allocate, build_layout
from kvagent.core.plan import ReadPlan, assign, make_plan
from kvagent.core.specs import CacheSpec, FullAttentionSpec, ModelInfo, WorkerInfo
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows

RUNS = 5
MALLINFO2 = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)
MAP_NORESERVE = 0x4000
BLOCK_SIZE = 16


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO2)


def _malloced() -> int:
    """Bytes in use by malloc, of this thread's arena and of mappings of their own."""
    call = ctypes.CDLL(None).mallinfo2
    call.restype = _MallInfo
    info = call()
    return int(info.uordblks + info.hblkhd)


class _Agent(NixlAgent):
    def make(self, lists: PreparedLists, piece: Piece) -> int:
        """A request that is never posted."""
        return int(self._request(lists, piece))


def _measure(layers: int, blocks: int, fetched: int) -> Preparing:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=4, dtype="bfloat16")
    specs: dict[str, CacheSpec] = {f"layer.{i}": spec for i in range(layers)}
    info = WorkerInfo(engine_id="one", model=ModelInfo(name="m"))
    nbytes, views = allocate(specs, info, blocks)
    # Never touched: what is measured knows addresses only.
    maps = [mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | MAP_NORESERVE) for _ in range(2)]
    ranges = [MemoryRange(ctypes.addressof(ctypes.c_char.from_buffer(m)), nbytes) for m in maps]
    near, far = (build_layout(specs, info, views, (r,), blocks) for r in ranges)
    agents = [
        _Agent(f"{name}/{uuid.uuid4().hex}", serving=name == "serve", segments=None)
        for name in ("serve", "fetch")
    ]
    for agent, memory in zip(agents, reversed(ranges), strict=True):
        agent.register([memory])
    name = agents[1].load(agents[0].metadata())
    agents[1].connect(name)

    def prepare() -> tuple[ReadPlan, PreparedLists]:
        (assignment,) = assign(near, [far])
        plan = make_plan(near, far, assignment)
        lists = PreparedLists(name, Rows(plan.local_rows), Rows(plan.remote_rows))
        agents[1].prepare(lists)
        return plan, lists

    peer = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        plan, lists = prepare()
        peer.append((time.perf_counter() - begin) * 1e3)
        agents[1].unprepare(lists)
    tracemalloc.start()
    malloced, traced = _malloced(), tracemalloc.get_traced_memory()[0]
    plan, lists = prepare()
    peer_bytes = _malloced() - malloced + tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()

    local = [np.arange(fetched, dtype=np.int32)]
    remote = [np.random.default_rng(0).permutation(blocks)[:fetched].astype(np.int32)]
    select, make = [], []
    for _ in range(RUNS):
        begin = time.perf_counter()
        picked = plan.select(local, remote, 0, fetched * BLOCK_SIZE)
        select.append((time.perf_counter() - begin) * 1e3)
        piece = Piece(0, picked.local_index, picked.remote_index, NO_EXTRA)
        begin = time.perf_counter()
        handle = agents[1].make(lists, piece)
        make.append((time.perf_counter() - begin) * 1e3)
        agents[1].free(handle)
    return Preparing(
        layers,
        blocks,
        fetched,
        statistics.median(peer),
        peer_bytes,
        statistics.median(select),
        statistics.median(make),
        statistics.median(a / b for a, b in zip(select, make, strict=True)),
    )


if __name__ == "__main__":
    print(msgspec.json.encode(_measure(*map(int, sys.argv[1:]))).decode())

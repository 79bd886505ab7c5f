"""Frames that are wrong in every way: a seeded generator over real messages of every kind."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psutil

from kvagent.core.output import KVConnectorOutput
from kvagent.core.specs import FullAttentionSpec, ModelInfo, WorkerInfo
from kvagent.fabric.base import PeerMetadata
from kvagent.fabric.place import read_place
from kvagent.wire import messages as m
from kvagent.wire.messages import Local, Peer
from tests.harness import Sidecar

LONG = 120.0
"""A bound against hangs, never reached."""

SPEC = FullAttentionSpec(
    block_size=4,
    num_kv_heads=1,
    head_size=8,
    dtype="float32",
    axes=("kv", "block", "head", "token", "channel"),
)
BLOCKS = (b"\x00\x00\x00\x00\x02\x00\x00\x00",)
METADATA = PeerMetadata(
    agent="x",
    blob=bytes(300),
    digest=bytes(32),
    probe_address=4096,
    probe_digest=bytes(32),
    options={},
)
ODD_VALUES: Sequence[Any] = (
    None,
    True,
    -1,
    0,
    1 << 31,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 300,
    "x" * 70_000,
    "\x1b[31m\nforged line",
    b"",
    bytes(65),
    bytes(40_000),
    [],
    {},
    [[[[]]]] * 50,
    {"type": "ok"},
    list(range(5000)),
)


def tags(union: Any) -> set[str]:
    return {str(kind.__struct_config__.tag) for kind in union.__args__}


def peer_messages(hello: m.Hello, welcome: m.Welcome, ticket: dict[str, Any]) -> list[bytes]:
    """One of each kind, encoded. `ticket` is a real one, so that some of its claims are good.

    A peer that is let in may speak as a rank of the engine, and would then be believed: what
    speaks as one here is of another engine.
    """
    card = welcome.ranks[0]
    ours = ticket["kvagent"]
    name, token = str(ours["transfer_id"]), bytes.fromhex(ours["token"])
    engine, fetch = "fuzz", "fuzz-fetch"
    found: list[Peer] = [
        m.JoinLeader(
            engine_id=engine,
            attached=True,
            said_at=1,
            shape=hello.shape,
            card=card,
            reading_for=("a",),
        ),
        m.Welcomed(leader="x"),
        m.Who(),
        m.Presence(version="1", place=read_place()),
        hello,
        welcome,
        m.Meet(engine_id=hello.engine_id, shape=hello.shape, incarnation=card.incarnation),
        m.Met(metadata=METADATA),
        m.Refused(code="x", message="y"),
        m.Claim(transfer_id=name, token=token, fetch_id=fetch, engine_id=engine, digest=bytes(32)),
        m.Renew(leases=(m.LeaseRef(name, fetch), m.LeaseRef("t2", "f2"))),
        m.Renewed(verdicts=("held",)),
        m.Complete(
            engine_id=engine,
            leases=(
                m.Completion(name, token, fetch, bytes(32)),
                m.Completion("t2", bytes(16), "f2", bytes(32)),
            ),
        ),
        m.Completed(epoch="e", verdicts=("held", "unknown")),
        m.Release(transfer_id=name, token=bytes(16), fetch_id=fetch),
        m.Verdict(verdict="held", epoch="e", lease_seconds=30.0),
        m.Part(
            part_id="fuzz-part",
            leader=card.incarnation,
            engine_id="nobody",
            host="127.0.0.1",
            port=1,
            epoch="e",
            num_tokens=8,
            remote_blocks=BLOCKS,
            local_blocks=BLOCKS,
            start_token=0,
        ),
        m.PartState(done=True),
        m.PartDone(engine_id=engine, tp_rank=1, pp_rank=0, part_id="fuzz-part"),
        m.AbortPart(part_id="fuzz-abort", fence=True),
        m.CopyDown(leader=card.incarnation, blocks=BLOCKS, num_tokens=8),
        m.Drop(engine_id=engine),
        m.Ok(),
    ]
    assert {str(each.__struct_config__.tag) for each in found} == tags(Peer)
    return [m.peer_codec.encode(each) for each in found]


def local_messages() -> list[bytes]:
    """One of each kind, encoded, but no `Drain`: a sidecar that was drained stays so."""
    info = WorkerInfo(engine_id="fuzz", model=ModelInfo(name="fuzz", num_layers=1))
    common = {"host": "127.0.0.1", "port": 1, "transfer_id": "t", "token": bytes(16)}
    found: list[Local] = [
        m.Join(info=info),
        m.JoinAccepted(endpoint="127.0.0.1:1", version="1"),
        m.Allocate(specs={"l": SPEC}, num_blocks=8),
        m.Allocate(specs={"l": SPEC}, num_blocks=8, gpu="uuid"),
        m.Allocated(nbytes=4096, views={}, pages="4 KiB"),
        m.Allocated(
            nbytes=4096, views={}, pages="gpu", memory=m.GpuMemory(gpu="uuid", handle=bytes(64))
        ),
        m.Register(specs={"l": SPEC}, num_blocks=8, ranges=(m.SharedRange(nbytes=4096),), views={}),
        m.Registered(),
        m.Attach(),
        m.Waiting(reason="x"),
        m.Ready(engine_id="fuzz", host="h", port=1, tp_size=1, epoch="e", lease_seconds=30.0),
        m.Offer(request_id="r", transfer_id="t", token=bytes(16), blocks=BLOCKS, num_tokens=8),
        m.Offer(
            request_id="e", transfer_id="e", token=bytes(16), blocks=BLOCKS, num_tokens=8, event=7
        ),
        m.Fetch(
            request_id="f",
            engine_id="nobody",
            epoch="e",
            num_tokens=8,
            remote_blocks=BLOCKS,
            local_blocks=BLOCKS,
            **common,
        ),
        m.Hold(engine_id="nobody", epoch="e", num_tokens=8, remote_blocks=BLOCKS, **common),
        m.ReleaseTicket(engine_id="nobody", **common),
        m.Cancel(request_id="r"),
        m.Drained(),
        m.Quiesce(timeout=0.01),
        m.Quiesced(),
        m.Resume(),
        m.DropPeer(engine_id="nobody"),
        m.Report(seq=1, output=KVConnectorOutput(finished_sending={"r"})),
        m.Ack(seq=1),
        m.Failed(code="x", message="y"),
    ]
    assert {str(each.__struct_config__.tag) for each in found} == tags(Local) - {"drain"}
    return [m.local_codec.encode(each) for each in found]


class Fuzz:
    """Wrong messages, always the same ones for a seed."""

    def __init__(self, seed: int, examples: Sequence[bytes]) -> None:
        self.random = random.Random(seed)
        self._examples = examples
        self._ways: Sequence[Callable[[bytes], bytes]] = (
            lambda data: data,  # a replay
            self._truncated,
            self._flipped,
            self._spliced,
            self._altered,
            self._altered,
            self._noise,
        )

    def message(self) -> bytes:
        data = self.random.choice(self._examples)
        return self.random.choice(self._ways)(data)

    def _truncated(self, data: bytes) -> bytes:
        return data[: self.random.randrange(len(data))]

    def _flipped(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.random.choice((1, 1, 2, 8))):
            changed[self.random.randrange(len(changed))] ^= 1 << self.random.randrange(8)
        return bytes(changed)

    def _spliced(self, data: bytes) -> bytes:
        other = self.random.choice(self._examples)
        return data[: self.random.randrange(len(data))] + other[self.random.randrange(len(other)) :]

    def _noise(self, data: bytes) -> bytes:
        return self.random.randbytes(self.random.choice((0, 1, 7, len(data), 5000)))

    def _altered(self, data: bytes) -> bytes:
        """Still msgpack; one value, somewhere inside, is something else."""
        tree = msgspec.msgpack.decode(data)
        node = tree
        while True:
            keys = list(node) if isinstance(node, dict) else range(len(node))
            if not keys:
                break
            key = self.random.choice(keys)
            child = node[key]
            if isinstance(child, (dict, list)) and child and self.random.random() < 0.7:
                node = child
                continue
            how = self.random.randrange(8)
            if how == 0:
                del node[key]
            elif how == 1 and isinstance(node, dict):
                node[f"{key}x"] = child
            elif how == 2 and isinstance(node, list):
                node += node * 200
            else:
                node[key] = self.random.choice(ODD_VALUES)
            break
        return msgspec.msgpack.encode(tree)


class Health:
    """How a sidecar takes it: its memory and its log."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._sidecar = sidecar
        self._process = psutil.Process(sidecar.process.pid)
        self._rss = self._process.memory_info().rss
        self._log = os.path.getsize(sidecar.log)

    def check(self, rss: int = 64 << 20, log: int = 256 << 10) -> None:
        """At most so many bytes more than when this was made."""
        assert self._sidecar.process.poll() is None, self._sidecar.log.read_text()[-4000:]
        grown = self._process.memory_info().rss - self._rss
        written = os.path.getsize(self._sidecar.log) - self._log
        print(f"rss +{grown / 2**20:.1f} MiB, log +{written / 2**10:.1f} KiB")
        assert grown < rss, f"{grown / 2**20:.1f} MiB more"
        assert written < log, self._sidecar.log.read_text()[-4000:]


def until(done: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + LONG
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.01)

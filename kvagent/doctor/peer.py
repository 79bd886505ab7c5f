"""Reads from a running engine, as a consumer would. Run as a process.

`peer HOST PORT KEYS` (the folder of keys, or an empty word) knocks, asks the engine's leader who
it is, says hello with the shape that it is told, meets every rank, checks each one's canary, reads
from its cache memory into a buffer that nobody looks at, and prints a `PeerRead` as JSON. Nothing
is claimed and nothing is written, and a rank only shows its memory to whoever gets through the
handshake.
"""

from __future__ import annotations

import asyncio
import sys
import uuid

import msgspec

from kvagent.config import join_address
from kvagent.doctor.knock import Knock, Reach, knock
from kvagent.doctor.memory import Sample, make_sample
from kvagent.doctor.reading import NBYTES, Reading, new_fabric, read_peer
from kvagent.doctor.who import ask
from kvagent.errors import HandshakeError, KVAgentError
from kvagent.wire.control import Control
from kvagent.wire.messages import Hello, Meet, Met, Peer, Presence, RankCard, Welcome
from kvagent.wire.peer import PeerClient

__all__ = ["PeerRead", "RankRead"]

CALL_SECONDS = 10.0


class RankRead(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` for people, `address` as the rank advertises it; `fabric` is the name of what read."""

    rank: str
    fabric: str
    address: str
    kind: str = "dram"
    reading: Reading | None = None
    error: str = ""


class PeerRead(msgspec.Struct, frozen=True, kw_only=True):
    """`error`: why the handshake went no further; `refused`: that is what the peer said.
    `knock`: None when not even that was tried."""

    knock: Knock | None = None
    presence: Presence | None = None
    ranks: tuple[RankRead, ...] = ()
    error: str = ""
    refused: bool = False


async def examine(host: str, port: int, keys: str) -> PeerRead:
    found = await asyncio.to_thread(knock, host, port)
    if found.reach is not (Reach.LOCKED if keys else Reach.OPEN):
        return PeerRead(knock=found)
    try:
        presence = await ask(host, port, CALL_SECONDS, keys)
    except KVAgentError as error:
        refused = isinstance(error, HandshakeError)
        return PeerRead(knock=found, error=str(error), refused=refused)
    if presence.shape is None:
        return PeerRead(knock=found, presence=presence)
    control = Control(keys=keys)
    try:
        hello = Hello(
            sender=f"doctor-{uuid.uuid4().hex}",
            engine_id=presence.engine_id,
            shape=presence.shape,
        )
        welcome = await _call(control, host, port, hello)
        if not isinstance(welcome, Welcome):
            raise HandshakeError(f"Hello was answered with {type(welcome).__name__}")
        sample = make_sample("ordinary", NBYTES)
        ranks = [
            await _read_rank(control, hello, card, sample, f"doctor-peer-{index}")
            for index, card in enumerate(welcome.ranks)
        ]
        return PeerRead(knock=found, presence=presence, ranks=tuple(ranks))
    except KVAgentError as error:
        return PeerRead(knock=found, presence=presence, error=str(error))
    finally:
        await control.close()


async def _read_rank(
    control: Control, hello: Hello, card: RankCard, sample: Sample, name: str
) -> RankRead:
    """With a fabric of its own: a rank that cannot be read ends no other's reads."""
    about = RankRead(
        rank=f"tp {card.tp_rank}, pp {card.pp_rank}",
        fabric=name,
        address=join_address(card.host, card.port),
        kind=card.layout.kind,
    )
    fabric = new_fabric(name)
    try:
        card.layout.validate()
        meet = Meet(engine_id=hello.engine_id, shape=hello.shape, incarnation=card.incarnation)
        met = await _call(control, card.host, card.port, meet)
        if not isinstance(met, Met):
            raise HandshakeError(f"Meet was answered with {type(met).__name__}")
        far = max(card.layout.ranges, key=lambda each: each.nbytes)
        await fabric.start()
        await fabric.register([sample.range])
        reading = await read_peer(fabric, met.metadata, sample.range, far)
        return msgspec.structs.replace(about, reading=reading)
    except (KVAgentError, asyncio.TimeoutError) as error:
        words = str(error) or "its memory did not answer"
        return msgspec.structs.replace(about, error=words)
    finally:
        await fabric.close()


async def _call(control: Control, host: str, port: int, question: Peer) -> Peer:
    client = PeerClient(control, host, port)
    try:
        return await client.call(question, CALL_SECONDS)
    finally:
        await client.close()


if __name__ == "__main__":
    result = asyncio.run(examine(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
    print("\n" + msgspec.json.encode(result).decode())

"""Reads between two processes of this machine. Run as processes.

`selfread KIND` reads memory of one kind out of a second process, `selfread KIND serve`, into memory
of the same kind, checks the bytes, and prints a `SelfRead` as JSON.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterable

import msgspec

from kvagent.core.regions import MemoryRange
from kvagent.doctor.memory import NoMemory, Sample, make_sample
from kvagent.doctor.reading import NBYTES, Reading, new_fabric, read_peer
from kvagent.errors import FabricError, KVAgentError
from kvagent.fabric.base import PeerMetadata

__all__ = ["READER", "SelfRead"]

READER = "doctor-read"
"""Name of the fabric that reads."""
END_SECONDS = 20.0


class SelfRead(msgspec.Struct, frozen=True, kw_only=True):
    """`copy_seconds`: the same bytes by a plain copy, which no transport can beat. `pages`: what
    the memory is made of.
    `absent`: why there is no such memory; `error`: why it could not be read."""

    kind: str
    reading: Reading | None = None
    copy_seconds: float = 0.0
    pages: str = ""
    absent: str = ""
    error: str = ""


async def _serve(kind: str) -> None:
    sample = make_sample(kind, NBYTES)
    sample.fill()
    fabric = new_fabric("doctor-serve")
    await fabric.start()
    await fabric.register([sample.range])
    print(msgspec.json.encode((fabric.metadata, sample.range)).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await fabric.close()


def _read(kind: str) -> SelfRead:
    sample = make_sample(kind, NBYTES)
    with subprocess.Popen(
        [sys.executable, "-m", "kvagent.doctor.selfread", kind, "serve"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "UCX_PROTO_INFO": "n"},
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            meta, far = _address_in(server.stdout)
            reading = asyncio.run(_measure(sample, meta, far))
        finally:
            server.stdin.close()
            server.wait(END_SECONDS)
    if not sample.is_filled():
        raise FabricError("the bytes that arrived are not those that were sent")
    return SelfRead(
        kind=kind, reading=reading, copy_seconds=sample.copy_seconds(), pages=sample.pages
    )


def _address_in(lines: Iterable[str]) -> tuple[PeerMetadata, MemoryRange]:
    """Among what UCX logs, the line that `_serve` prints."""
    said = ""
    for said in lines:
        if said.startswith("["):
            try:
                return msgspec.json.decode(said, type=tuple[PeerMetadata, MemoryRange])
            except msgspec.DecodeError:
                continue  # UCX begins its lines so, too
    raise FabricError(f"the process that was to be read from did not start: {said.strip()}")


async def _measure(sample: Sample, meta: PeerMetadata, far: MemoryRange) -> Reading:
    fabric = new_fabric(READER)
    await fabric.start()
    try:
        await fabric.register([sample.range])
        return await read_peer(fabric, meta, sample.range, far)
    finally:
        await fabric.close()


def main(kind: str) -> SelfRead:
    try:
        return _read(kind)
    except NoMemory as error:
        return SelfRead(kind=kind, absent=str(error))
    except (KVAgentError, asyncio.TimeoutError) as error:
        return SelfRead(kind=kind, error=str(error) or "connecting took too long")


if __name__ == "__main__":
    if sys.argv[2:] == ["serve"]:
        asyncio.run(_serve(sys.argv[1]))
    else:
        print("\n" + msgspec.json.encode(main(sys.argv[1])).decode())

"""What `preparing`, a process of its own, finds out."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from kvagent.errors import KVAgentError

__all__ = ["Preparing", "measure_preparing"]


class Preparing(msgspec.Struct, frozen=True):
    """`peer_ms`, `peer_bytes`: assignment, plan and both prepared lists of one peer. `select_ms`,
    `make_ms`: a fetch's index arrays, and `make_prepped_xfer` on them; `ratio` is of the rounds."""

    layers: int
    blocks: int
    fetched: int
    peer_ms: float
    peer_bytes: int
    select_ms: float
    make_ms: float
    ratio: float


def measure_preparing(layers: int = 80, blocks: int = 100_000, fetched: int = 8192) -> Preparing:
    """`fetched` blocks of a cache of `blocks`, none beside its neighbour."""
    command = [sys.executable, "-m", "kvagent.bench.preparing"]
    done = subprocess.run(
        [*command, str(layers), str(blocks), str(fetched)],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return msgspec.json.decode(done.stdout.rstrip().rpartition("\n")[2], type=Preparing)
    except msgspec.MsgspecError as error:
        raise KVAgentError(f"preparing: {done.stdout[-500:]}{done.stderr[-500:]}") from error

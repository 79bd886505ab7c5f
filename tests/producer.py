"""An engine in a process of its own, so that tests can kill it: `python -m tests.producer ...`.

Joins one sidecar, fills its cache with `pattern(seed)`, offers every block as one transfer, prints
the ticket as a line of JSON, and waits to be killed.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from kvagent import EngineClient, FullAttentionSpec, ModelInfo, WorkerClient, WorkerInfo

LAYERS, HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 4, 64, 16
MODEL = ModelInfo(name="test", num_layers=LAYERS)
SPEC = FullAttentionSpec(
    block_size=BLOCK_SIZE,
    num_kv_heads=HEADS,
    head_size=HEAD_SIZE,
    dtype="float32",
    axes=("kv", "block", "head", "token", "channel"),
)
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK_SIZE * HEAD_SIZE * 4


def pattern(seed: int, layer: int, shape: torch.Size) -> torch.Tensor:
    """The values of one layer."""
    generator = torch.Generator().manual_seed(1000 * seed + layer)
    return torch.randint(-(2**30), 2**30, shape, generator=generator, dtype=torch.int32).view(
        torch.float32
    )


def main(socket: str, engine_id: str, num_blocks: int, seed: int) -> None:
    worker = WorkerClient(socket, timeout=60)
    worker.join(WorkerInfo(engine_id=engine_id, model=MODEL))
    caches = worker.allocate_kv_caches(
        {f"layer.{i}": SPEC for i in range(LAYERS)}, num_blocks=num_blocks
    )
    for i, cache in enumerate(caches.values()):
        cache.copy_(pattern(seed, i, cache.shape))
    engine = EngineClient(socket)
    engine.wait_ready(60)
    ticket = engine.offer("request", list(range(num_blocks)), num_blocks * BLOCK_SIZE)
    print(json.dumps(ticket), flush=True)
    while True:
        engine.step()
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

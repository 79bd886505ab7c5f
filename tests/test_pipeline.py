"""Pipeline parallel over real NIXL: layers match by name, and a draft model's are left out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from kvagent import EngineClient, FullAttentionSpec, ModelInfo, WorkerClient, WorkerInfo
from tests.harness import HND, START_SECONDS, Sidecar, start

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=4, head_size=8, dtype="float32", axes=HND)
MODEL = ModelInfo(name="pipeline", num_layers=5)
LAYERS = [f"layer.{i}" for i in range(5)]


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    made = start(tmp_path_factory.mktemp("pipeline"), [f"s{i}" for i in range(8)])
    yield made
    for sidecar in made:
        sidecar.close()


class Stages:
    """An engine of tp x pp ranks; each stage holds the layers that are given for it."""

    def __init__(
        self, sidecars: Sequence[Sidecar], engine_id: str, tp: int, stages: Sequence[Sequence[str]]
    ) -> None:
        self.tp = tp
        self.workers: list[WorkerClient] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        leader = None
        for index, sidecar in enumerate(sidecars[: tp * len(stages)]):
            worker = WorkerClient(sidecar.socket, timeout=START_SECONDS)
            worker.join(
                WorkerInfo(
                    engine_id=engine_id,
                    model=MODEL,
                    tp_rank=index % tp,
                    tp_size=tp,
                    pp_rank=index // tp,
                    pp_size=len(stages),
                    leader=leader,
                )
            )
            leader = leader or worker.endpoint
            specs = dict.fromkeys(stages[index // tp], SPEC)
            self.caches.append(worker.allocate_kv_caches(specs, num_blocks=16))
            self.workers.append(worker)
        self.client = EngineClient(sidecars[0].socket)
        self.client.wait_ready(START_SECONDS)

    def head(self, layer: str, head: int) -> torch.Tensor:
        """(kv, block, token, channel) of one head, wherever it is."""
        share = 4 // self.tp
        for index, caches in enumerate(self.caches):
            if layer in caches and index % self.tp == head // share:
                return caches[layer][:, :, head % share]
        raise AssertionError(f"{layer} head {head} is nowhere")

    def close(self) -> None:
        self.client.close()
        for worker in self.workers:
            worker.close()


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ((1, [LAYERS[:2], LAYERS[2:]]), (1, [LAYERS])),
        ((1, [LAYERS]), (1, [LAYERS[:3], LAYERS[3:]])),
        ((2, [LAYERS[:1], LAYERS[1:]]), (1, [LAYERS[:3], LAYERS[3:4], LAYERS[4:]])),
        ((1, [[*LAYERS, "draft.0"]]), (2, [[*LAYERS, "other.0"]])),
    ],
    ids=["2-1", "1-2", "tp2pp2-pp3", "draft-layers"],
)
def test_layers_match_by_name(
    sidecars: list[Sidecar],
    producer: tuple[int, list[list[str]]],
    consumer: tuple[int, list[list[str]]],
) -> None:
    one = Stages(sidecars[:4], "p", *producer)
    two = Stages(sidecars[4:], "d", *consumer)
    try:
        for rank, caches in enumerate(one.caches):
            for layer, cache in caches.items():
                torch.manual_seed(100 * rank + len(layer))
                cache.copy_(torch.randn(cache.shape))
        ticket = one.client.offer("r", [3, 1, 2], 11)
        two.client.fetch("r", ticket, [9, 8, 7], 2)
        until = time.monotonic() + 20
        out = two.client.step()
        while not out.finished_recving:
            assert time.monotonic() < until
            time.sleep(0.001)
            out = two.client.step()
        assert out.failed_recving == {}
        for layer in LAYERS:
            for head in range(4):
                want = one.head(layer, head)[:, [3, 1, 2]].flatten(1, 2)
                got = two.head(layer, head)[:, [9, 8, 7]].flatten(1, 2)
                assert torch.equal(got[:, 2:11], want[:, 2:11])
                assert (got[:, :2] == 0).all()
                assert (got[:, 11:] == 0).all()
        for caches in two.caches:
            if "other.0" in caches:
                assert (caches["other.0"] == 0).all()
                log = sidecars[4].log.read_text()
                assert "since only engine d has them: other.0" in log
                assert "since only engine p has them: draft.0" in log
    finally:
        one.close()
        two.close()

"""The benchmark's parts that start no process: shapes, block tables, ratios, tables, the peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from starlette.testclient import TestClient

from kvagent.bench.ceilings import layouts
from kvagent.bench.measure import Phases, Result
from kvagent.bench.mooncake import _runs
from kvagent.bench.peer import RemoteFar, application
from kvagent.bench.plot import draw
from kvagent.bench.questions import Placed
from kvagent.bench.run import Options, measure
from kvagent.bench.shapes import SHAPES, Fragmentation, Request, Shape, Workload, read_shapes
from kvagent.bench.show import as_data, print_points, print_results
from kvagent.bench.targets import Point
from kvagent.errors import ConfigError, KVAgentError

KIB = 1024


def test_the_shapes_are_those_of_the_models() -> None:
    assert SHAPES["llama-3.1-8b"].bytes_per_token() == 128 * KIB
    assert SHAPES["llama-3.1-70b"].bytes_per_token() == 320 * KIB
    assert SHAPES["qwen3-235b-a22b"].bytes_per_token() == 188 * KIB
    assert SHAPES["deepseek-r1"].bytes_per_token() == 61 * 576 * 2
    assert SHAPES["smollm2-135m"].bytes_per_token() == 30 * 2 * 3 * 64 * 2
    # Of the windowed layers only the last 128 tokens travel.
    assert SHAPES["gpt-oss-120b"].bytes_per_token() == 18 * 2 * 8 * 64 * 2


def test_what_ranks_hold_twice_counts_twice() -> None:
    assert SHAPES["deepseek-r1"].bytes_per_token(tp=8) == 8 * 61 * 576 * 2
    assert SHAPES["qwen3-235b-a22b"].bytes_per_token(tp=8) == 2 * 188 * KIB
    assert SHAPES["smollm2-135m"].bytes_per_token(tp=3) == SHAPES["smollm2-135m"].bytes_per_token()


def test_windows_are_a_cache_group_of_their_own() -> None:
    specs = SHAPES["gpt-oss-120b"].specs(16)
    windows = [spec.sliding_window for spec in specs.values()]  # type: ignore[union-attr]
    assert windows == [128, None] * 18
    assert [spec.group for spec in specs.values()] == [1, 0] * 18
    assert SHAPES["gpt-oss-120b"].groups == 2
    assert SHAPES["llama-3.1-8b"].groups == 1


@pytest.mark.parametrize("count", [1, 2, 7, 512])
@pytest.mark.parametrize("kind", list(Fragmentation))
def test_every_block_is_in_the_table_once(kind: Fragmentation, count: int) -> None:
    table = kind.table(count)
    assert table.dtype == np.int32
    assert sorted(table.tolist()) == list(range(count))


def test_tables_are_as_fragmented_as_they_say() -> None:
    breaks = {kind: int((np.diff(kind.table(1024)) != 1).sum()) for kind in Fragmentation}
    assert breaks[Fragmentation.contiguous] == 0
    assert 500 <= breaks[Fragmentation.half] <= 511
    assert breaks[Fragmentation.shuffled] > 1010


def workload(**facts: Any) -> Workload:
    shape = Shape(layers=2, kv_heads=4, head_size=8)
    return Workload(**{"name": "w", "shape": shape, "tokens": 64, **facts})


def test_requests_share_no_block() -> None:
    work = workload(concurrency=3, fragmentation=Fragmentation.shuffled)
    requests = work.requests()
    assert len(requests) == 3
    for side in ("local", "remote"):
        ids = [block for request in requests for block in getattr(request, side)]
        assert sorted(ids) == list(range(work.num_blocks))


def test_a_size_becomes_tokens() -> None:
    per_token = 2 * 2 * 4 * 8 * 2
    work = workload(concurrency=2).resized(2 * 10 * 16 * per_token)
    assert work.tokens == 160
    assert workload().resized(1).tokens == 16
    replicated = workload(consumer_tp=8).resized(10 * 16 * per_token * 2)
    assert replicated.tokens == 160


def test_odd_workloads_are_refused() -> None:
    with pytest.raises(ConfigError, match="whole blocks"):
        workload(tokens=20)
    with pytest.raises(ConfigError, match="1 or more"):
        workload(concurrency=0)


def test_a_file_adds_shapes(tmp_path: Path) -> None:
    path = tmp_path / "shapes.toml"
    path.write_text(
        "[mine]\nlayers = 3\nkv_heads = 2\nhead_size = 4\nwindow = 32\nfull_every = 3\n"
    )
    shapes = read_shapes(str(path))
    assert shapes["mine"] == Shape(layers=3, kv_heads=2, head_size=4, window=32, full_every=3)
    assert shapes.keys() >= SHAPES.keys()
    for text in ("[x]\nlayers = 1\n", "[x]\nlayers = 1\nhead_size = 1\nheads = 2\n", "x"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_shapes(str(path))
    with pytest.raises(ConfigError):
        read_shapes(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(models=["gpt-5"]), "no model 'gpt-5'"),
        (Options(transport="ib"), "shm, tcp"),
        (Options(fragmentations=["none"]), "contiguous, half, shuffled"),
        (Options(mooncake=True), "--transport tcp"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        measure(options)


def test_the_raw_ranks_have_our_layout() -> None:
    work = workload(producer_tp=2)
    (one, one_bytes), (two, two_bytes) = layouts(work, 2)
    assert (one.tp_rank, two.tp_rank) == (0, 1)
    assert one_bytes == two_bytes == 2 * 2 * work.num_blocks * 16 * 2 * 8 * 2


def test_mooncake_gets_the_same_runs() -> None:
    shuffled = workload(fragmentation=Fragmentation.shuffled, tokens=16 * 64)
    near, far, length, nbytes = _runs(shuffled)
    block = 16 * 4 * 8 * 2
    assert length == block
    assert nbytes == 4 * 64 * block
    assert len(near) == 4 * 64
    assert sorted(far) == near == list(range(0, nbytes, block))
    table = Fragmentation.shuffled.table(64)
    assert far[:64] == (table * block).tolist()
    near, far, length, _ = _runs(workload(tokens=16 * 64))
    assert (near, far, length) == ([i * 64 * block for i in range(4)], near, 64 * block)


def result(ours: list[float], **others: list[float]) -> Result:
    return Result(
        workload=workload(),
        transport="shm",
        nbytes=10**9,
        descriptors=4,
        pages="huge",
        phases=Phases(prepare=0.1, post=0.2, wire=0.3, completion=0.4, total=1.0),
        seconds={"kvagent": ours, **others},
    )


def test_ratios_are_of_what_was_measured_side_by_side() -> None:
    # A machine that gets slower all the time: the ratio is the same in each round.
    found = result([1.0, 2.0, 4.0], nixl=[0.5, 1.0, 2.0])
    assert found.gbps() == 0.5
    assert found.ratio("nixl") == 0.5


def test_tables_and_data_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    results = [result([0.5], nixl=[0.25], tcp=[1.0])]
    points = [
        Point.at_most(3, "p50", 512.3, 400, "us"),
        Point.at_least(4, "rate", 0.95, 0.9),
        Point.left_out(5, "netns", "needs root"),
    ]
    assert [point.met for point in points] == [False, True, None]
    print_results(results)
    print_points(points)
    shown = capsys.readouterr().out
    for words in ("4.00 (0.50 x)", "1.00 (2.00 x)", "512 us", "NOT met", "left out: needs root"):
        assert words in shown
    data = msgspec.to_builtins(as_data(results, points))
    assert data["results"][0]["ratio"] == {"nixl": 0.5, "tcp": 2.0}
    assert data["targets"][2]["met"] is None


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    one, two = result([0.5], nixl=[0.25]), result([0.4], nixl=[0.2])
    draw(str(path), [one, two], [one])
    assert path.read_bytes().startswith(b"\x89PNG")


class FakeFar:
    here = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def setup(self, work: Workload) -> None:
        self.calls.append(work)

    def offer(self, requests: dict[str, Request]) -> list[dict[str, Any]]:
        return [{"name": name, "blocks": request.remote} for name, request in requests.items()]

    def settle(self, names: Any) -> None:
        raise KVAgentError(f"{list(names)} did not end")

    def raw(self, ordinary: bool) -> list[Placed]:
        return [Placed(1, 2, int(ordinary), "host", 3)]

    def expose(self, way: str) -> list[bytes]:
        return [b"\x00" + way.encode()]

    def close(self) -> None:
        self.calls.append("closed")


def test_the_other_side_may_be_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeFar()
    app = TestClient(application(fake), base_url="http://peer")
    monkeypatch.setattr(httpx, "Client", lambda **_: app)
    far = RemoteFar("http://peer/")
    far.setup(workload(fragmentation=Fragmentation.half))
    assert fake.calls == [workload(fragmentation=Fragmentation.half)]
    assert far.offer({"a": Request([1], [2], 16)}) == [{"name": "a", "blocks": [1]}]
    assert far.raw(True) == [Placed(1, 2, 1, "host", 3)]
    assert far.expose("nixl") == [b"\x00nixl"]
    with pytest.raises(KVAgentError, match=r"\['a'\] did not end"):
        far.settle(["a"])
    far.close()
    assert fake.calls[-1] == "closed"
    assert app.post("/", content=b"{}").status_code == 400

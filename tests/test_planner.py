"""`kvagent plan`: descriptions, numbers, words, the drawing, and the plan of running sidecars."""

from __future__ import annotations

import itertools
import json
import re
import socket
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvagent.agent.agent import Agent
from kvagent.cli import app
from kvagent.core.layout import MemoryRange, allocate, build_layout
from kvagent.core.specs import CacheSpec, FullAttentionSpec, ModelInfo, TokenShard, WorkerInfo
from kvagent.errors import ConfigError
from kvagent.planner.describe import Engine, describe, read_description
from kvagent.planner.drawing import MAX_LINK, plan_svg
from kvagent.planner.report import PlanReport, Read, plan_report
from kvagent.planner.status import engine_of_status, fetch_status
from kvagent.planner.table import plan_text
from kvagent.planner.words import layer_words, run_words, size_words
from kvagent.visible.status import cards
from tests import harness

SHORT = """
engine = "prefill"
tp = 4
pp = 1
num_blocks = 1024

[model]
name = "llama"
num_layers = 32

[[cache]]
layers = "model.layers.{}"
from = 0
to = 32
kind = "full"
block_size = 16
num_kv_heads = 8
head_size = 128
dtype = "bfloat16"
axes = ["kv", "block", "head", "token", "channel"]
"""

FULL: dict[str, Any] = {"kind": "full", "block_size": 16, "num_kv_heads": 8, "head_size": 64}
MLA: dict[str, Any] = {"kind": "mla", "block_size": 64, "head_size": 576}
MAMBA: dict[str, Any] = {
    "kind": "mamba",
    "group": 1,
    "conv": [{"name": "x", "units": 16, "size": 64}, {"name": "B", "units": 4, "size": 32}],
    "conv_width": 3,
    "ssm_heads": 16,
    "ssm_shape": [64, 16],
}


def engine(tp: int = 1, pp: int = 1, *, layers: int = 4, name: str = "e", **fields: Any) -> Engine:
    """An engine of one kind of layer; `fields` are the spec's, or `top` for the description's."""
    top = fields.pop("top", {})
    table = {"layers": "layers.{}", **({} if "kind" in fields else FULL), **fields}
    return describe({**description(layers, table), "tp": tp, "pp": pp, **top}, f"{name}.toml")


def description(layers: int, *tables: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_blocks": 64,
        "model": {"name": "m", "num_layers": layers},
        "cache": [dict(table) for table in tables],
    }


def who(report: PlanReport) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """consumer (tp, pp) -> the producers it reads, in order."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for read in report.reads:
        consumer, producer = read.consumer, read.producer
        found.setdefault((consumer.tp_rank, consumer.pp_rank), []).append(
            (producer.tp_rank, producer.pp_rank)
        )
    return found


# ---------------------------------------------------------------- descriptions


def test_a_short_description_is_what_the_specs_say(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text(SHORT)
    described = read_description(str(path))
    assert described.name == "prefill"
    model = ModelInfo(name="llama", num_layers=32)
    spec = FullAttentionSpec(
        block_size=16,
        num_kv_heads=8,
        head_size=128,
        axes=("kv", "block", "head", "token", "channel"),
    )
    specs: dict[str, CacheSpec] = {f"model.layers.{i}": spec for i in range(32)}
    for rank, layout in enumerate(described.layouts):
        info = WorkerInfo(engine_id="prefill", model=model, tp_rank=rank, tp_size=4)
        nbytes, views = allocate(specs, info, 1024)
        memory = MemoryRange(layout.ranges[0].address, nbytes)
        assert layout == build_layout(specs, info, views, (memory,), 1024)


def test_defaults_are_one_rank_and_the_name_of_the_file() -> None:
    found = engine(name="some/where/decode")
    assert found.name == "decode"
    assert [(each.tp_size, each.pp_size) for each in found.layouts] == [(1, 1)]
    assert found.layouts[0].layers == tuple(f"layers.{i}" for i in range(4))


@pytest.mark.parametrize(
    ("top", "ends"),
    [({}, [2, 4, 7]), ({"pp_layers": [4, 1, 2]}, [4, 5, 7])],
)
def test_pipeline_ranks_take_layers_in_order(top: dict[str, Any], ends: list[int]) -> None:
    layouts = engine(2, 3, layers=7, top=top).layouts
    names = [f"layers.{i}" for i in range(7)]
    starts = [0, *ends]
    for layout in layouts:
        assert list(layout.layers) == names[starts[layout.pp_rank] : ends[layout.pp_rank]]
    assert [(each.pp_rank, each.tp_rank) for each in layouts] == [
        (pp, tp) for pp in range(3) for tp in range(2)
    ]


def test_hybrid_layers_interleave_and_draft_layers_come_last() -> None:
    found = describe(
        {
            **description(
                8,
                {"layers": "layers.{}.attn", "from": 3, "step": 4, **FULL},
                {"layers": "draft.0", **FULL},
                {"layers": "layers.{}.attn", "from": [0, 1, 2], "step": 4, **MAMBA},
            ),
            "pp": 2,
        },
        "h.toml",
    )
    first, second = found.layouts
    assert first.layers == tuple(f"layers.{i}.attn" for i in range(4))
    assert second.layers == (*(f"layers.{i}.attn" for i in range(4, 8)), "draft.0")
    assert {family.part for family in first.families} == {"k", "v", "conv.x", "conv.B", "ssm"}
    report = plan_report(found, found, 64)
    assert who(report) == {(0, 0): [(0, 0)], (0, 1): [(0, 1)]}
    assert "layers 4-7, draft 0" in plan_svg(report)


def test_split_contexts_deal_heads_to_groups_of_ranks() -> None:
    layouts = engine(4, num_kv_heads=2, tokens={"size": 2, "interleave": 8}).layouts
    assert [each.families[0].heads for each in layouts] == [
        (0, 1, 2),
        (0, 1, 2),
        (1, 2, 2),
        (1, 2, 2),
    ]
    shards = [TokenShard(rank=rank % 2, size=2, interleave=8) for rank in range(4)]
    assert [each.groups[0].tokens for each in layouts] == shards


def test_heads_may_be_given_for_each_rank_or_for_all() -> None:
    each = engine(2, heads=[[0, 5], [5, 8]]).layouts
    assert [layout.families[0].heads for layout in each] == [(0, 5, 8), (5, 8, 8)]
    same = engine(2, heads=[0, 8]).layouts
    assert [layout.families[0].heads for layout in same] == [(0, 8, 8), (0, 8, 8)]


def test_scales_and_conv_parts_are_tables() -> None:
    scaled = engine(2, dtype="int8", scale_mode="s", scales={"dtype": "float16"}).layouts[0]
    assert {family.part for family in scaled.families} == {"k", "v", "k_scale", "v_scale"}
    held = dict(MAMBA, conv=[{"name": "x", "units": 16, "size": 4, "held": [[0, 4], [4, 16]]}])
    state = describe({**description(2, {"layers": "l.{}", **held}), "tp": 2}, "s.toml")
    assert [layout.families[0].heads for layout in state.layouts] == [(0, 4, 16), (4, 16, 16)]


WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"num_block": 1}, {}, "w.toml: unknown key 'num_block'; did you mean 'num_blocks'?"),
    ({"tp": "2"}, {}, "w.toml.tp: expected `int`, got `str`"),
    ({"tp": 0}, {}, "w.toml: tp is 0; it must be from 1 to 1024"),
    ({"tp": 512, "pp": 4}, {}, "tp x pp is more than 1024 ranks"),
    ({"pp": 5}, {}, "w.toml: pp is 5, but there are 4 layers"),
    (
        {"pp": 2, "pp_layers": [4]},
        {},
        "pp_layers [4] must be 2 counts of at least 1 with the sum 4",
    ),
    ({"cache": []}, {}, "w.toml: cache: 0 layers"),
    ({"num_blocks": 0}, {}, "w.toml: num_blocks is 0"),
    ({"model": {"nam": "m"}}, {}, "w.toml: model: unknown key 'nam'; did you mean 'name'?"),
    ({"model": {}}, {}, "w.toml.model: object missing required field `name`"),
    ({}, {"kind": "ful"}, "cache[0].kind: 'ful' is none of full, mla, mamba; did you mean 'full'?"),
    ({}, {"blocksize": 4}, "cache[0]: unknown key 'blocksize'; did you mean 'block_size'?"),
    ({}, {"head_size": 1.5}, "w.toml: cache[0].head_size: expected `int`, got `float`"),
    ({}, {"head_size": 0}, "cache[0]: FullAttentionSpec.head_size is 0"),
    ({}, {"dtype": "bf16"}, "cache[0]: unknown dtype 'bf16'"),
    ({}, {"axes": ["block"]}, "cache[0]: FullAttentionSpec.axes is ('block',)"),
    ({}, {"from": 4}, "cache[0]: layers from 4 to 4 by 1 are no numbers"),
    ({}, {"to": 5000}, "cache[0]: layers from 0 to 5000"),
    ({}, {"layers": "one", "step": 2}, "cache[0].step: `layers` has no {}"),
    ({}, {"layers": ["a", "a"]}, "cache[0].layers: 'a' is described twice"),
    ({}, {"tokens": {"size": 3}}, "cache[0].tokens.size: tp 2 is not a multiple of 3"),
    ({}, {"tokens": {"rank": 1}}, "cache[0].tokens: unknown key 'rank'"),
    ({}, {"tokens": 2}, "cache[0].tokens: must be a table of size, interleave"),
    ({}, {"tokens": {"size": 2, "interleave": 5}}, "not a multiple of tokens.interleave 5"),
    ({}, {"scales": {"axis": []}}, "cache[0].scales: unknown key 'axis'; did you mean 'axes'?"),
    ({}, {"heads": [[0, 4]]}, "cache[0].heads: 1 ranges for 2 ranks"),
    ({}, {"heads": [0, 9]}, "cache[0]: FullAttentionSpec: heads (0, 9) are not a range of 8"),
    ({}, {"conv": []}, "cache[0]: unknown key 'conv'"),
    ({}, {**MAMBA, "conv": [{"nam": "x"}]}, "cache[0].conv[0]: unknown key 'nam'"),
    ({}, {**MAMBA, "conv": "x"}, "cache[0].conv: must be a list of tables"),
]


@pytest.mark.parametrize(("top", "fields", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_mistakes_are_named(top: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    table = {"layers": "layers.{}", **(fields if fields.get("group") else {**FULL, **fields})}
    with pytest.raises(ConfigError, match=re.escape(words)):
        describe({**description(4, table), "tp": 2, **top}, "w.toml")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        read_description(str(tmp_path / "none.toml"))
    bad = tmp_path / "bad.toml"
    bad.write_text("engine = ")
    with pytest.raises(ConfigError, match=r"bad\.toml' is not TOML"):
        read_description(str(bad))


def test_layers_of_one_group_must_fit_together() -> None:
    other = {"layers": "b", **FULL, "block_size": 32}
    with pytest.raises(ConfigError, match=r"g\.toml: layer 'b' does not fit cache group 0"):
        describe(description(1, {"layers": "a", **FULL}, other), "g.toml")


# ---------------------------------------------------------------- numbers


def test_heads_that_do_not_divide_and_pipeline() -> None:
    report = plan_report(engine(4), engine(3, 2, block_size=48), 384)
    assert report.works
    assert who(report) == {
        (tp, pp): sources
        for pp in range(2)
        for tp, sources in enumerate(([(0, 0)], [(1, 0), (2, 0)], [(2, 0), (3, 0)]))
    }
    second = report.reads[1]
    assert [(piece.heads, piece.num_heads) for piece in second.pieces] == [((2, 4), 8)]
    assert second.pieces[0].parts == ("k", "v")
    assert second.pieces[0].layers == ("layers.0", "layers.1")
    assert second.nbytes == 2 * 2 * 384 * 2 * 64 * 2  # layers, K and V, tokens, heads, size, bytes
    assert report.nbytes == 4 * 2 * 384 * 8 * 64 * 2


def test_replicas_are_spread_and_latents_are_read_once() -> None:
    report = plan_report(engine(4, **MLA), engine(2, **MLA))
    assert who(report) == {(0, 0): [(0, 0)], (1, 0): [(2, 0)]}
    more = plan_report(engine(4, num_kv_heads=1), engine(4, num_kv_heads=1))
    assert who(more) == {(tp, 0): [(tp, 0)] for tp in range(4)}


def test_runs_of_good_and_bad_block_tables() -> None:
    report = plan_report(engine(), engine(), 512)
    (read,) = report.reads
    block = 16 * 8 * 64 * 2
    assert msgspec.structs.astuple(read.contiguous) == (8, 32 * block, 32 * block)
    assert msgspec.structs.astuple(read.fragmented) == (8 * 32, block, block)


def test_runs_merge_slots_of_unequal_blocks_and_count_ragged_ends() -> None:
    producer, consumer = engine(block_size=32), engine(block_size=48)
    (read,) = plan_report(producer, consumer, 100, 4).reads
    token = 8 * 64 * 2
    assert read.contiguous.descriptors >= 8
    assert read.nbytes == 8 * 96 * token
    # Tokens 4-15 and 96-99 are parts of granules; no two blocks are neighbours on both sides.
    assert read.fragmented.shortest == 4 * token
    assert read.fragmented.longest == 32 * token


def test_an_overfull_cache_is_still_fragmented() -> None:
    (read,) = plan_report(engine(), engine(), 64 * 16).reads
    assert 8 * 62 <= read.fragmented.descriptors <= 8 * 64


def test_states_have_one_block() -> None:
    tables = ({"layers": "layers.{}", **MAMBA, "group": 0},)
    one = describe(description(4, *tables), "a.toml")
    two = describe({**description(4, *tables), "tp": 2}, "b.toml")
    report = plan_report(one, two)
    assert who(report) == {(0, 0): [(0, 0)], (1, 0): [(0, 0)]}
    whole = 4 * (3 * (16 * 64 + 4 * 32) * 2 + 16 * 64 * 16 * 4)
    assert report.nbytes == whole


def test_no_tokens_are_no_reads_of_any_bytes() -> None:
    (read,) = plan_report(engine(), engine(), 32, 32).reads
    assert (read.nbytes, read.contiguous.descriptors, read.contiguous.longest) == (0, 0, 0)
    assert "one request, no tokens" in plan_text(plan_report(engine(), engine(), 32, 32))


def test_tokens_default_to_what_fits() -> None:
    large = engine(top={"num_blocks": 1024})
    assert plan_report(large, large).num_tokens == 4096
    assert plan_report(large, engine()).num_tokens == 1024
    with pytest.raises(ConfigError, match=r"2000 tokens do not fit into engine 'e': .* holds 1024"):
        plan_report(large, engine(), 2000)
    with pytest.raises(ConfigError, match="start token 9 is not from 0 to 8"):
        plan_report(large, large, 8, 9)


AXES = [
    ("kv", "block", "token", "head", "channel"),
    ("kv", "block", "head", "token", "channel"),
    ("block", "kv", "head", "token", "channel"),
    ("block", "token", "head", "channel"),
]


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Engine, Engine, int, int]:
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    kv = draw(st.booleans())
    sides = []
    for name in ("producer", "consumer"):
        size = draw(st.sampled_from([1, 1, 2, 4]))
        sides.append(
            engine(
                size * draw(st.integers(1, 4)),
                draw(st.integers(1, layers)),
                layers=layers,
                name=name,
                num_kv_heads=heads,
                head_size=4,
                block_size=draw(st.sampled_from([4, 8, 12, 16])),
                axes=list(draw(st.sampled_from(AXES[:3] if kv else AXES[3:]))),
                tokens={"size": size, "interleave": draw(st.sampled_from([1, 2, 4]))},
            )
        )
    stop = draw(st.integers(1, 256))
    return sides[0], sides[1], stop, draw(st.integers(0, stop))


@given(pairs())
def test_every_rank_gets_its_bytes_once(pair: tuple[Engine, Engine, int, int]) -> None:
    producer, consumer, stop, start = pair
    report = plan_report(producer, consumer, stop, start)
    assert report.works, report
    for layout in consumer.layouts:
        place = (layout.tp_rank, layout.pp_rank)
        reads = [r for r in report.reads if (r.consumer.tp_rank, r.consumer.pp_rank) == place]
        h0, h1, _ = layout.families[0].heads
        shard = layout.groups[0].tokens
        tokens = sum(
            token // shard.interleave % shard.size == shard.rank for token in range(start, stop)
        )
        wanted = len(layout.layers) * 2 * tokens * (h1 - h0) * 4 * 2
        assert sum(read.nbytes for read in reads) == wanted
        for read in reads:
            check_runs(read)
    ET.fromstring(plan_svg(report))
    assert len(plan_text(report).splitlines()) >= len(consumer.layouts)


def check_runs(read: Read) -> None:
    for runs in (read.contiguous, read.fragmented):
        assert runs.shortest * runs.descriptors <= read.nbytes <= runs.longest * runs.descriptors
    assert read.contiguous.descriptors <= read.fragmented.descriptors


# ---------------------------------------------------------------- refusals


def test_differences_are_named_with_both_values() -> None:
    producer = engine(dtype="float16", top={"model": {"name": "x", "num_layers": 4}})
    report = plan_report(producer, engine())
    assert [msgspec.structs.astuple(each) for each in report.refused] == [
        ("model.name", "m", "x"),
        ("layers[layers.0 +3].dtype", "bfloat16", "float16"),
    ]
    assert not report.works
    assert not report.reads
    text = plan_text(report)
    assert "model.name: consumer 'm', producer 'x'" in text
    assert "dtype: consumer 'bfloat16', producer 'float16'" in text


def test_a_pair_without_a_plan_is_refused() -> None:
    report = plan_report(engine(heads=[0, 4]), engine())
    assert not report.refused
    assert not report.works
    assert "no remote rank holds heads [4, 8)" in report.unsupported
    assert "tp 0, pp 0 of the consumer" in plan_text(report)


def test_layers_on_one_side_are_left_out_and_named() -> None:
    table = {"layers": "layers.{}", **FULL}
    draft = {"layers": "draft.{}", "to": 2, **FULL}
    report = plan_report(engine(), describe(description(4, table, draft), "c.toml"))
    assert report.only_consumer == ("draft.0", "draft.1")
    assert report.only_producer == ()
    assert report.works
    assert report.nbytes == plan_report(engine(), engine()).nbytes
    assert "only c has draft.0-1: left out" in plan_text(report)
    assert "Only c has draft.0-1: left out." in plan_svg(report)


# ---------------------------------------------------------------- words and drawing


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (["a.0", "a.1", "a.2", "a.5"], "a.0-2,5"),
        (["a.3", "a.7", "a.11"], "a.3-11/4"),
        (["a.0.attn", "a.1.attn", "b"], "a.0-1.attn, b"),
        (["l.00", "l.01"], "l.00, l.01"),
        ([], ""),
    ],
)
def test_layer_words(layers: list[str], words: str) -> None:
    assert layer_words(layers) == words


def test_brief_layer_words_keep_the_word_before_the_number() -> None:
    assert layer_words(["model.layers.0.attn", "model.layers.1.attn"], brief=True) == "layers 0-1"


def test_size_words() -> None:
    sizes = [0, 1023, 1024, 1536, 1 << 20, (1 << 30) - 1, 5 << 40]
    words = ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 MiB", "1 GiB", "5 TiB"]
    assert [size_words(size) for size in sizes] == words


def test_the_table_says_who_reads_what() -> None:
    report = plan_report(engine(4, name="p"), engine(2, name="c"), 64)
    lines = plan_text(report).splitlines()
    assert lines[:2] == ["p (tp 4, pp 1) -> c (tp 2, pp 1)", "one request, tokens 0-63"]
    row = next(line for line in lines if line.startswith("tp 0, pp 0"))
    runs = run_words(report.reads[0].contiguous)
    assert re.split(r"  +", row)[:6] == [
        "tp 0, pp 0",
        "tp 0, pp 0",
        "layers.0-3",
        "heads 0-1 of 8",
        "128 KiB",
        runs,
    ]
    idle = plan_text(plan_report(engine(4, **MLA), engine(1, **MLA)))
    assert "not read from: tp 1, pp 0; tp 2, pp 0; tp 3, pp 0" in idle


SVG = "{http://www.w3.org/2000/svg}"


def widths(report: PlanReport) -> list[float]:
    """Of the links; the last two paths are the legend's."""
    paths = ET.fromstring(plan_svg(report)).findall(f"{SVG}path")
    return [float(path.attrib["stroke-width"]) for path in paths][:-2]


def test_links_are_as_wide_as_their_bytes() -> None:
    report = plan_report(engine(8, 2), engine(3, 2, block_size=32))
    found = widths(report)
    assert len(found) == len(report.reads)
    ratios = [width / read.nbytes for width, read in zip(found, report.reads, strict=True)]
    assert np.allclose(ratios, ratios[0], rtol=0.01)
    used: dict[object, float] = {}
    for width, read in zip(found, report.reads, strict=True):
        for end in (("producer", read.producer), ("consumer", read.consumer)):
            used[end] = used.get(end, 0) + width
    assert max(used.values()) == pytest.approx(MAX_LINK, abs=0.1)


def test_the_drawing_names_every_rank_and_stays_inside() -> None:
    root = ET.fromstring(plan_svg(plan_report(engine(8, 2, name="p"), engine(8, 2, name="c"))))
    words = [text.text for text in root.iter(f"{SVG}text")]
    for tp in range(8):
        for pp in range(2):
            assert words.count(f"tp {tp}, pp {pp}") == 2
        assert words.count(f"head {tp} of 8") == 4
    assert words.count("layers 0-1") == words.count("layers 2-3") == 16
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    boxes = [
        [float(rect.attrib[key]) for key in ("x", "y", "width", "height")]
        for rect in root.iter(f"{SVG}rect")
    ]
    assert all(x >= 0 and x + w <= width and y >= 0 and y + h <= height for x, y, w, h in boxes)
    frames = sorted(box for box in boxes if box[2] > 300 and box[3] < 100)
    assert len(frames) == 32
    for one, other in itertools.pairwise(frames):
        assert one[0] != other[0] or one[1] + one[3] <= other[1]


def test_names_cannot_break_the_drawing() -> None:
    name = '</text><script>"&\u0000'
    report = plan_report(engine(top={"engine": name}), engine())
    root = ET.fromstring(plan_svg(report))
    assert not list(root.iter(f"{SVG}script"))
    assert any('</text><script>"&?' in (text.text or "") for text in root.iter(f"{SVG}text"))


# ---------------------------------------------------------------- the command


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    one, other = tmp_path / "one.toml", tmp_path / "other.toml"
    one.write_text(SHORT)
    other.write_text(SHORT.replace("prefill", "decode").replace("tp = 4", "tp = 2"))
    return str(one), str(other)


def test_the_command_prints_and_draws(files: tuple[str, str], tmp_path: Path) -> None:
    svg = tmp_path / "plan.svg"
    found = CliRunner().invoke(app, ["plan", *files, "--tokens", "64", "--svg", str(svg)])
    assert found.exit_code == 0, found.output
    assert found.output.startswith("prefill (tp 4, pp 1) -> decode (tp 2, pp 1)\n")
    ET.fromstring(svg.read_text())
    with pytest.raises(ConfigError, match="cannot write"):
        CliRunner().invoke(
            app, ["plan", *files, "--svg", str(tmp_path / "no" / "x")], catch_exceptions=False
        )


def test_the_command_prints_json(files: tuple[str, str]) -> None:
    arguments = ["plan", *files, "--tokens", "64", "--start-token", "16", "--json"]
    found = CliRunner().invoke(app, arguments)
    values = json.loads(found.output)
    assert values["works"]
    assert (values["start_token"], values["num_tokens"]) == (16, 64)
    assert values["nbytes"] == sum(read["nbytes"] for read in values["reads"])
    assert [read["producer"]["tp_rank"] for read in values["reads"]] == [0, 1, 2, 3]
    assert set(values["reads"][0]["fragmented"]) == {"descriptors", "shortest", "longest"}


def test_the_command_fails_for_a_refused_pair(files: tuple[str, str], tmp_path: Path) -> None:
    Path(files[1]).write_text(SHORT.replace("bfloat16", "float16"))
    svg = tmp_path / "plan.svg"
    found = CliRunner().invoke(app, ["plan", *files, "--svg", str(svg)])
    assert found.exit_code == 1
    assert "dtype: consumer 'float16', producer 'bfloat16'" in found.output
    assert not svg.exists()


# ---------------------------------------------------------------- running sidecars


def agent_of(engine: Engine) -> Agent:
    """The parts of a leader that `cards` looks at."""
    first, *rest = engine.layouts
    members = [SimpleNamespace(shape=engine.shape, card=SimpleNamespace(layout=x)) for x in rest]
    team = SimpleNamespace(complete=True, followers=lambda: members)
    me = SimpleNamespace(index=0, shape=engine.shape, layout=first)
    return cast(
        Agent,
        SimpleNamespace(rank=SimpleNamespace(identity=me), leader=SimpleNamespace(team=team)),
    )


def test_the_status_shows_geometry_without_addresses() -> None:
    moved = tuple(
        msgspec.structs.replace(layout, ranges=(MemoryRange(0x7F123456, layout.ranges[0].nbytes),))
        for layout in engine(2, 2, name="p").layouts
    )
    secret = Engine("p", engine(2, 2).shape, moved)
    shown = json.dumps({"engine_id": "p", "cards": cards(agent_of(secret))})
    assert str(0x7F123456) not in shown
    read = engine_of_status(json.loads(shown), "url")
    consumer = engine(3, name="c")
    assert plan_report(read, consumer) == plan_report(engine(2, 2, name="p"), consumer)


def test_only_a_complete_leader_shows_cards() -> None:
    agent = agent_of(engine(2))
    agent.leader.team = cast(Any, SimpleNamespace(complete=False))
    assert cards(agent) is None
    agent.rank.identity = None
    assert cards(agent) is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ({}, "u is not the status of a sidecar"),
        ([], "u is not the status of a sidecar"),
        ({"cards": None, "role": "follower", "rank": 2}, "rank 2 is a follower; ask the leader"),
        ({"cards": None, "not_ready": "waiting"}, "u shows no cache: not ready: waiting"),
        ({"cards": [{}], "engine_id": "e"}, "missing required field `shape`"),
        ({"cards": [], "engine_id": "e"}, "an engine has at least one rank"),
    ],
)
def test_a_useless_status_is_refused(status: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        engine_of_status(status, "u")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[str]:
    """The URL of a real sidecar with a cache of 2 layers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    sidecars = harness.start(tmp_path, ["a"], "--http", address)
    try:
        with harness.Engine(sidecars, "real", layers=2):
            yield f"http://{address}/"
    finally:
        for sidecar in sidecars:
            sidecar.close()


def test_two_urls_of_running_sidecars(running: str) -> None:
    until = time.monotonic() + 30
    while True:
        try:
            found = fetch_status(running)
            break
        except ConfigError:
            assert time.monotonic() < until
            time.sleep(0.1)
    assert found.name == "real"
    assert found.layouts[0].layers == ("layer.0", "layer.1")
    result = CliRunner().invoke(app, ["plan", "--from-status", running, running, "--json"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["nbytes"] == 2 * 2 * values["num_tokens"] * 4 * 8 * 4


def test_a_url_that_does_not_answer_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot read {url}/status"):
            fetch_status(url)

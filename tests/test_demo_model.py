"""The demo engine computes what Hugging Face transformers computes, however it is set up."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvagent.demo.config import HND, NHD, default_model
from kvagent.demo.engine import Engine
from kvagent.demo.gguf_file import GGUFFile
from kvagent.demo.tokenizer import load_tokenizer
from kvagent.errors import ConfigError, TopologyError
from tests.demo_models import ask, running, write_tiny

TOKENS = 16
TEXTS = [
    "The capital of France is",
    "<|im_start|>user\nWhat is 12345 + 678?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "It's 3.14159, isn't it?  Grüße aus Köln — 東京 \U0001f600\t\n\n end ",
]


@pytest.fixture(scope="module")
def model() -> Path:
    return default_model()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with running(model, max_batch_tokens=200) as engine:
        yield engine


@pytest.fixture(scope="module")
def long_prompts() -> list[list[int]]:
    """Several hundred tokens each, unlike each other."""
    rng = random.Random(3)
    return [[rng.randrange(20, 40000) for _ in range(length)] for length in (310, 230)]


@pytest.fixture(scope="module")
def prompts(engine: Engine, long_prompts: list[list[int]]) -> list[list[int]]:
    return [engine.tokenizer.encode(text) for text in TEXTS] + long_prompts


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    """The tokens of each prompt when it is the only one."""
    return [ask(engine, prompt, TOKENS).wait().token_ids for prompt in prompts]


@pytest.fixture(scope="module")
def reference(model: Path) -> tuple[Any, Any]:
    """transformers' own reading of the same file: model and tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not ours to mend
        from transformers import AutoModelForCausalLM, AutoTokenizer

        where: dict[str, Any] = {"gguf_file": model.name}
        tokenizer = AutoTokenizer.from_pretrained(model.parent, **where)
        network = AutoModelForCausalLM.from_pretrained(model.parent, dtype=torch.float32, **where)
    return network.eval(), tokenizer


def greedy(network: Any, prompt: list[int], count: int) -> tuple[int, ...]:
    network.generation_config.eos_token_id = None
    tokens = torch.tensor([prompt])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = network.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.timeout(300)  # transformers takes its time to read a GGUF file
def test_greedy_tokens_equal_transformers(
    reference: tuple[Any, Any], prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    network, _ = reference
    assert [greedy(network, prompt, TOKENS) for prompt in prompts[:5]] == alone[:5]


def test_token_ids_equal_transformers(reference: tuple[Any, Any], engine: Engine) -> None:
    _, tokenizer = reference
    for text in TEXTS:
        ids = engine.tokenizer.encode(text)
        assert ids == tokenizer(text)["input_ids"]
        assert engine.tokenizer.decode(ids) == tokenizer.decode(ids, skip_special_tokens=True)


def test_numbers_are_split_into_characters(engine: Engine) -> None:
    """The model's own tokenizer does so before all else; transformers' conversion forgets it,
    which shows only in numbers that are no digits."""
    for text in ("1999", "x²", "3 ½"):
        assert len(engine.tokenizer.encode(text)) >= len(text)


def test_a_batch_equals_one_by_one(
    engine: Engine, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    answers = [ask(engine, prompt, TOKENS) for prompt in prompts]
    assert [answer.wait().token_ids for answer in answers] == alone


def test_tp_3_equals_tp_1(
    model: Path, prompts: list[list[int]], alone: list[tuple[int, ...]]
) -> None:
    with running(model, tp=3) as engine:
        answers = [ask(engine, prompt, TOKENS) for prompt in prompts]
        assert [answer.wait().token_ids for answer in answers] == alone


# ------------------------------------------------------------------ a tiny checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tiny_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(48)]
    return [shared + [rng.randrange(256) for _ in range(length)] for length in (1, 40, 17, 150)]


@pytest.fixture(scope="module")
def tiny_alone(tiny: Path, tiny_prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with running(tiny) as engine:
        return [ask(engine, prompt, TOKENS).wait().token_ids for prompt in tiny_prompts]


@pytest.mark.parametrize("tied", [False, True])
def test_a_safetensors_directory_equals_transformers(tmp_path: Path, tied: bool) -> None:
    from transformers import LlamaForCausalLM

    path = write_tiny(tmp_path / "model", tie_word_embeddings=tied)
    network = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = list(range(40, 140))
    with running(path) as engine:
        assert ask(engine, prompt, 40).wait().token_ids == greedy(network, prompt, 40)


@pytest.mark.parametrize(
    "options",
    [
        {"axes": NHD},
        {"axes": ("block", "kv", "token", "head", "channel")},
        {"axes": ("token", "channel", "head", "block", "kv")},
        {"block_size": 5},
        {"max_batch_tokens": 7},
        {"prefix_cache": True},
        {"prefix_cache": True, "num_blocks": 16},
        {"max_requests": 1},
    ],
    ids=str,
)
def test_settings_do_not_change_tokens(
    tiny: Path,
    tiny_prompts: list[list[int]],
    tiny_alone: list[tuple[int, ...]],
    options: dict[str, Any],
) -> None:
    with running(tiny, **options) as engine:
        for _ in range(2):  # the second time out of the prefix cache, where there is one
            answers = [ask(engine, prompt, TOKENS) for prompt in tiny_prompts]
            assert [answer.wait().token_ids for answer in answers] == tiny_alone
        assert engine.scheduler.blocks.num_free == engine.options.num_blocks


@pytest.mark.parametrize("tp", [2, 4])
def test_uneven_and_replicated_kv_heads(
    tiny: Path, tiny_prompts: list[list[int]], tiny_alone: list[tuple[int, ...]], tp: int
) -> None:
    with running(tiny, tp=tp, axes=HND) as engine:
        answers = [ask(engine, prompt, TOKENS) for prompt in tiny_prompts]
        assert [answer.wait().token_ids for answer in answers] == tiny_alone


def test_the_prefix_cache_is_used(tiny: Path, tiny_prompts: list[list[int]]) -> None:
    with running(tiny, prefix_cache=True) as engine:
        cached = []
        for prompt in tiny_prompts[:2]:
            info = ask(engine, prompt, 4).wait().kv_transfer
            assert info is not None
            cached.append(info["cached_tokens"])
    assert cached == [0, 48]


def test_a_bfloat16_cache(tiny: Path) -> None:
    with running(tiny, kv_dtype="bfloat16") as engine:
        assert len(ask(engine, range(50), 4).wait().token_ids) == 4


def test_a_seed_fixes_what_is_sampled(tiny: Path) -> None:
    with running(tiny) as engine:
        first, second, other = (
            ask(engine, range(20), 30, temperature=1.0, seed=seed).wait().token_ids
            for seed in (1, 1, 2)
        )
    assert first == second != other


def test_the_end_of_text_ends_the_answer(tiny: Path, tiny_prompts: list[list[int]]) -> None:
    with running(tiny) as engine:
        last = ask(engine, tiny_prompts[1], TOKENS).wait().token_ids[5]
    path = write_tiny(tiny.parent / "eos", eos_token_id=[257, last])
    with running(path) as engine:
        answer = ask(engine, tiny_prompts[1], TOKENS, ignore_eos=False).wait()
    assert answer.finish_reason == "stop"
    assert answer.token_ids[-1] == last
    assert len(answer.token_ids) <= 6


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [([], 1, "empty"), ([259], 1, "token ids"), ([1], 0, "max_tokens"), ([1], 5000, "more than")],
)
def test_what_can_never_be_served_is_refused(
    tiny: Path, prompt: list[int], max_tokens: int, message: str
) -> None:
    with running(tiny) as engine, pytest.raises(ValueError, match=message):
        ask(engine, prompt, max_tokens)


def test_too_many_ranks(tiny: Path) -> None:
    with pytest.raises(TopologyError, match="TP 7"), running(tiny, tp=7):
        pass


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ConfigError, match="ends in the middle"):
        GGUFFile(tmp_path / "broken.gguf")
    with pytest.raises(ConfigError, match="neither"), running(tmp_path / "nothing"):
        pass
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)

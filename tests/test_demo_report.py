"""What the demo concludes from two answers, and how it says so."""

from __future__ import annotations

import io
import math
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from kvagent.demo.ask import add_event
from kvagent.demo.config import ModelConfig
from kvagent.demo.prompts import demo_prompts
from kvagent.demo.report import Answer, Report, Row, compare, kv_bytes, table
from kvagent.demo.show import Demo
from kvagent.errors import ConfigError

EXPECTED = 230400


def config(*, num_layers: int = 30, num_kv_heads: int = 3, head_size: int = 64) -> ModelConfig:
    return ModelConfig(
        name="model",
        vocab_size=100,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=num_layers,
        num_heads=9,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        rope_theta=1e4,
        rms_eps=1e-5,
        max_positions=8192,
        tied_embeddings=True,
    )


def served(**changes: object) -> Answer:
    transfer = {
        "bytes": EXPECTED,
        "wire": 0.002,
        "seconds": 0.010,
        "decode_tokens_per_s": 25.0,
    }
    answer = Answer(
        text=" Paris.\nIt",
        token_ids=[7, 8, 9],
        prompt_tokens=5,
        prefill="ok",
        prefill_ms=12.5,
        kv_transfer=transfer,
    )
    for name, value in changes.items():
        setattr(answer, name, value)
    return answer


def alone(**changes: object) -> Answer:
    answer = Answer(text=" Paris.\nIt", token_ids=[7, 8, 9], prompt_tokens=5)
    for name, value in changes.items():
        setattr(answer, name, value)
    return answer


def shown(rows: list[Row], width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, markup=False).print(table(rows))
    return out.getvalue()


@pytest.mark.parametrize(
    ("tp", "kv_heads", "copies"),
    [
        (1, 3, 3),
        (3, 3, 3),
        (2, 3, 3),  # 1 and 2 heads
        (4, 3, 4),  # two ranks hold the same head
        (9, 3, 9),
        (4, 8, 8),
    ],
)
def test_kv_bytes_counts_every_ranks_heads(tp: int, kv_heads: int, copies: int) -> None:
    shape = config(num_layers=30, num_kv_heads=kv_heads, head_size=64)
    assert kv_bytes(shape, "float32", tp, tokens=306) == 306 * 30 * 2 * copies * 64 * 4
    assert kv_bytes(shape, "bfloat16", tp, tokens=306) == 306 * 30 * 2 * copies * 64 * 2


def test_a_good_request_has_no_problem() -> None:
    row = compare(served(), alone(), EXPECTED)
    assert row.match
    assert row.problem == ""
    assert (row.prompt_tokens, row.output_tokens) == (5, 3)
    assert row.transfer_bytes == row.expected_bytes == EXPECTED
    assert row.transfer_ms == pytest.approx(2.0)
    assert row.fetch_ms == pytest.approx(10.0)
    assert row.transfer_gb_per_s is not None
    assert math.isclose(row.transfer_gb_per_s, EXPECTED / 0.002 / 1e9)
    assert row.decode_tokens_per_s == 25.0


@pytest.mark.parametrize(
    ("one", "two", "problem"),
    [
        (served(error="HTTP 502: gone"), alone(), "no answer: HTTP 502: gone"),
        (served(), alone(error="it broke off"), "no answer from the engine alone: it broke off"),
        (served(prefill="fallback; reason=http-500"), alone(), "fallback; reason=http-500"),
        (served(prefill=""), alone(), "the proxy did not say"),
        (served(kv_transfer={"failed": "expired: late"}), alone(), "not transferred: expired"),
        (served(kv_transfer={}), alone(), "0 bytes transferred"),
        (served(kv_transfer={"bytes": EXPECTED - 4}), alone(), "230396 bytes transferred"),
        (served(token_ids=[7, 1, 9]), alone(), "from output token 1 on"),
        (served(token_ids=[7, 8]), alone(), "tokens differ in number"),
    ],
)
def test_each_way_to_fall_short_is_named(one: Answer, two: Answer, problem: str) -> None:
    row = compare(one, two, EXPECTED)
    assert problem in row.problem
    report = Report.of([compare(served(), alone(), EXPECTED), row], 3, 1)
    assert not report.ok
    assert report.tokens_match == row.match


def test_a_fallback_is_a_failure_even_though_its_tokens_match() -> None:
    answer = served(prefill="fallback; reason=cooldown", kv_transfer={})
    report = Report.of([compare(answer, alone(), EXPECTED)], 3, 1)
    assert report.tokens_match
    assert not report.ok


def test_nothing_shown_is_not_ok() -> None:
    assert not Report.of([], 3, 1).ok
    assert not Report.of([compare(served(), alone(), EXPECTED)], 3, 1, error="a child ended").ok


def test_json_has_the_promised_fields() -> None:
    report = Report.of([compare(served(), alone(), EXPECTED)], 3, 1)
    data = msgspec.json.decode(msgspec.json.encode(report))
    assert {"ok", "tokens_match", "prefill_tp", "decode_tp", "requests"} <= data.keys()
    assert (data["ok"], data["prefill_tp"], data["decode_tp"]) == (True, 3, 1)
    promised = {"prompt_tokens", "transfer_bytes", "expected_bytes", "transfer_ms", "match", "text"}
    assert promised <= data["requests"][0].keys()


@pytest.mark.parametrize("width", [80, 120])
def test_table_keeps_its_numbers_and_cuts_the_text(width: int) -> None:
    long = served(text="one [bold]line[/bold]\n" * 20)
    text = shown([compare(long, alone(), EXPECTED), compare(served(), alone(), 1)], width)
    lines = text.splitlines()
    assert len(lines) == 5  # two of headings, a rule, two rows
    assert max(map(len, lines)) <= width
    assert lines[3].split()[:7] == ["5", "12", "0.23", "2.0", "0.12", "25.0", "yes"]
    assert "one [bold]" in lines[3]
    assert "…" in lines[3]
    assert "230400 byte" in lines[4]


def test_table_shows_a_request_without_an_answer() -> None:
    nothing = Answer(error="ConnectError: refused")
    text = shown([compare(nothing, alone(), 0)], 120)
    assert "NO" in text
    assert "ConnectError: refused" in text


def test_events_add_up_to_an_answer() -> None:
    answer = Answer()
    add_event(answer, {"choices": [{"text": " Par", "token_ids": [7], "finish_reason": None}]})
    last = {
        "choices": [{"text": "is", "token_ids": [8], "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5},
        "kv_transfer": {"bytes": 12},
    }
    add_event(answer, last)
    assert (answer.text, answer.token_ids, answer.prompt_tokens) == (" Paris", [7, 8], 5)
    assert answer.kv_transfer == {"bytes": 12}
    add_event(answer, {"error": {"message": "the engine stopped"}})
    assert answer.error == "the engine stopped"


def test_what_could_not_begin_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_model() -> Path:
        raise ConfigError("the default model is not installed")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("kvagent.demo.show.default_model", no_model)
    assert not Demo().run(as_json=False)
    said = capsys.readouterr().out
    assert "the default model is not installed" in said
    assert "logs" not in said
    assert not any(tmp_path.iterdir())


def test_prompts_differ_in_text_and_length() -> None:
    prompts = demo_prompts(32)
    assert len(set(prompts)) == 32
    assert len({len(prompt) for prompt in prompts[:6]}) == 6
    assert demo_prompts(2) == prompts[:2]

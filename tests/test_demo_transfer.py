"""Disaggregation as the demo engine sees it, with stand-ins for the sidecars: what it keeps, what
it says, and that its tokens are right whatever becomes of a fetch."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from kvagent import KVConnectorOutput
from kvagent.demo.config import HND, NHD, EngineOptions
from kvagent.demo.engine import Engine
from kvagent.demo.transfer import Transfers
from kvagent.demo.worker import plain_caches
from kvagent.errors import DrainingError, TicketError
from tests.demo_models import ANSWER_SECONDS, Answer, ask, running, write_tiny

TOKENS = 12
REMOTE_DECODE = {"do_remote_decode": True}
_transfers = itertools.count()


class FakeClient:
    """An `EngineClient` without a sidecar: a fetch copies from the other engine's tensors.

    While `held`, nothing ends. With `failure` set, a fetch writes rubbish and fails.
    """

    def __init__(self, others: dict[str, FakeClient]) -> None:
        self.caches: dict[str, torch.Tensor] = {}
        self.axes: tuple[str, ...] = ()
        self.calls: list[tuple[str, Any]] = []
        self.held = False
        self.failure: str | None = None
        self.refuses = False
        self.lost = threading.Event()
        self._others = others
        self._offers: dict[str, tuple[str, list[int], int]] = {}
        self._ended = KVConnectorOutput()
        self._later: list[Callable[[], None]] = []

    # what the engine calls

    def offer(self, request_id: str, block_ids: list[int], num_tokens: int) -> dict[str, Any]:
        if self.refuses:
            raise DrainingError("draining")
        transfer = f"t{next(_transfers)}"
        self.calls.append(("offer", (request_id, block_ids, num_tokens)))
        self._offers[transfer] = (request_id, block_ids, num_tokens)
        self._others[transfer] = self
        inner = {"transfer_id": transfer, "num_tokens": num_tokens}
        return {"do_remote_prefill": True, "do_remote_decode": False, "kvagent": inner}

    def fetch(
        self, request_id: str, ticket: Mapping[str, Any], block_ids: list[int], start_token: int = 0
    ) -> None:
        self.calls.append(("fetch", (request_id, block_ids, start_token)))
        transfer = ticket["kvagent"]["transfer_id"]
        if transfer not in self._others:
            raise TicketError("no such transfer")
        self._later.append(lambda: self._copy(request_id, transfer, block_ids, start_token))

    def release(self, ticket: Mapping[str, Any]) -> None:
        transfer = ticket["kvagent"]["transfer_id"]
        self.calls.append(("release", transfer))
        self._others.pop(transfer).sent(transfer)

    def cancel(self, request_id: str) -> None:
        self.calls.append(("cancel", request_id))
        for transfer, (offered, _, _) in list(self._offers.items()):
            if offered == request_id:
                self._others.pop(transfer).sent(transfer)
        self.failure = "cancelled"

    def step(self) -> KVConnectorOutput:
        while self._later and not self.held:
            self._later.pop(0)()
        out, self._ended = self._ended, KVConnectorOutput()
        return out

    def wait_lost(self) -> bool:
        return self.lost.wait()

    def close(self) -> None:
        self.lost.set()

    # what stands for the sidecars

    def sent(self, transfer: str) -> None:
        request_id = self._offers.pop(transfer)[0]
        self._ended.finished_sending = {request_id, *(self._ended.finished_sending or ())}

    def _copy(self, request_id: str, transfer: str, blocks: list[int], start: int) -> None:
        producer = self._others.pop(transfer)
        _, remote_blocks, num_tokens = producer._offers[transfer]
        size = self.block_size
        nbytes = 0
        for name, tensor in self.caches.items():
            mine, theirs = (
                _canonical(tensor, self.axes),
                _canonical(producer.caches[name], producer.axes),
            )
            for token in range(start, num_tokens):
                here = mine[:, blocks[token // size], :, token % size]
                there = theirs[
                    :, remote_blocks[token // producer.block_size], :, token % producer.block_size
                ]
                here.copy_(there if self.failure is None else torch.full_like(there, 1e3))
                nbytes += here.numel() * here.element_size()
        producer.sent(transfer)
        self._ended.finished_recving = {request_id, *(self._ended.finished_recving or ())}
        if self.failure is not None:
            self._ended.failed_recving[request_id] = self.failure
        else:
            stats = {"bytes": nbytes, "seconds": 0.001, "descriptors": 1}
            self._ended.kv_connector_stats = {"fetches": {request_id: stats}}

    @property
    def block_size(self) -> int:
        return _canonical(next(iter(self.caches.values())), self.axes).shape[3]


def _canonical(tensor: torch.Tensor, axes: tuple[str, ...]) -> torch.Tensor:
    return tensor.permute([axes.index(axis) for axis in HND])


class Pair:
    """A prefill and a decode engine; `expected` is what an engine on its own answers."""

    def __init__(self, model: Path, stack: ExitStack, patch: pytest.MonkeyPatch) -> None:
        self._model, self._stack, self._patch = model, stack, patch
        self._world: dict[str, FakeClient] = {}
        self.prefill, self.producer = self.start(axes=HND)
        self.decode, self.consumer = self.start(axes=NHD, block_size=8, prefix_cache=True)
        self.alone = stack.enter_context(running(model))

    def start(self, **options: Any) -> tuple[Engine, FakeClient]:
        client = FakeClient(self._world)

        class FakeWorker:
            endpoint = "127.0.0.1:1"

            def close(self) -> None:
                pass

        def join(
            options: EngineOptions,
            config: Any,
            revision: str,
            rank: int,
            leader: str | None,
            device: torch.device,
        ) -> tuple[FakeWorker, dict[str, torch.Tensor]]:
            from kvagent.demo.tp import Shard

            shard = Shard.of(config, rank, options.tp)
            client.caches = plain_caches(options, config, shard, torch.empty(0))
            client.axes = options.axes
            return FakeWorker(), client.caches

        def connect(options: EngineOptions) -> Transfers:
            return Transfers(client, options.block_size)  # type: ignore[arg-type]

        self._patch.setattr("kvagent.demo.worker.join_sidecar", join)
        self._patch.setattr("kvagent.demo.engine.connect_scheduler", connect)
        context = running(self._model, socket_template="/nowhere", **options)
        return self._stack.enter_context(context), client

    def ticket(self, prompt: list[int]) -> Mapping[str, Any]:
        answer = ask(self.prefill, prompt, 1, REMOTE_DECODE).wait()
        assert answer.kv_transfer_params is not None
        return answer.kv_transfer_params

    def expected(self, prompt: list[int]) -> tuple[int, ...]:
        return ask(self.alone, prompt, TOKENS).wait().token_ids


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + ANSWER_SECONDS
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.002)


def all_free(engine: Engine) -> bool:
    return engine.scheduler.blocks.num_free == engine.options.num_blocks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def pair(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(model, stack, monkeypatch)


def prompt_of(length: int) -> list[int]:
    return [random.Random(length).randrange(256) for _ in range(length)]


@pytest.mark.parametrize("length", [2, 16, 17, 75])
def test_decoding_continues_where_the_other_engine_stopped(pair: Pair, length: int) -> None:
    prompt = prompt_of(length)
    ticket = pair.ticket(prompt)
    offered = pair.producer.calls[0][1]
    assert offered[2] == length
    assert len(offered[1]) == -(-length // 16)
    assert not all_free(pair.prefill)

    answer = ask(pair.decode, prompt, TOKENS, ticket).wait()

    assert answer.token_ids == pair.expected(prompt)
    assert answer.kv_transfer is not None
    assert answer.kv_transfer["bytes"] == length * 3 * 2 * 3 * 8 * 4
    assert answer.kv_transfer["cached_tokens"] == length - 1  # only the last one is computed
    assert "failed" not in answer.kv_transfer
    until(lambda: all_free(pair.prefill) and all_free(pair.decode))


def test_many_at_once(pair: Pair) -> None:
    prompts = [prompt_of(length) for length in (20, 33, 47, 60, 64)]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    answers = [
        ask(pair.decode, prompt, TOKENS, ticket)
        for prompt, ticket in zip(prompts, tickets, strict=True)
    ]
    assert [a.wait().token_ids for a in answers] == [pair.expected(p) for p in prompts]


def test_a_failed_fetch_is_computed_here(pair: Pair) -> None:
    prompt = prompt_of(40)
    pair.consumer.failure = "stale: the lease ran out"
    answer = ask(pair.decode, prompt, TOKENS, pair.ticket(prompt)).wait()
    assert answer.token_ids == pair.expected(prompt)
    assert answer.kv_transfer is not None
    assert answer.kv_transfer["failed"] == "stale: the lease ran out"


@pytest.mark.parametrize(
    "ticket",
    [
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "kvagent": "x"},
        {"do_remote_prefill": True, "kvagent": {"transfer_id": "t", "num_tokens": 39}},
        {"do_remote_prefill": True, "kvagent": {"transfer_id": "unknown", "num_tokens": 40}},
    ],
)
def test_a_useless_ticket_is_computed_here(pair: Pair, ticket: dict[str, Any]) -> None:
    prompt = prompt_of(40)
    answer = ask(pair.decode, prompt, TOKENS, ticket).wait()
    assert answer.token_ids == pair.expected(prompt)
    assert answer.kv_transfer is not None
    assert "failed" in answer.kv_transfer


def test_an_engine_without_a_sidecar_computes_here(pair: Pair) -> None:
    prompt = prompt_of(40)
    answer = ask(pair.alone, prompt, TOKENS, pair.ticket(prompt)).wait()
    assert answer.token_ids == pair.expected(prompt)
    assert answer.kv_transfer is not None
    assert "no sidecar" in answer.kv_transfer["failed"]
    assert ask(pair.alone, prompt, 1, REMOTE_DECODE).wait().kv_transfer_params is None


def test_only_what_the_prefix_cache_lacks_is_fetched(pair: Pair) -> None:
    prompt = prompt_of(50)
    ask(pair.decode, prompt[:35], 1).wait()
    answer = ask(pair.decode, prompt, TOKENS, pair.ticket(prompt)).wait()
    assert pair.consumer.calls[-1][1][2] == 32
    assert answer.token_ids == pair.expected(prompt)


def test_a_full_prefix_hit_releases_the_ticket(pair: Pair) -> None:
    prompt = prompt_of(33)
    ask(pair.decode, prompt, 1).wait()
    answer = ask(pair.decode, prompt, TOKENS, pair.ticket(prompt)).wait()
    assert [name for name, _ in pair.consumer.calls] == ["release"]
    assert answer.token_ids == pair.expected(prompt)
    until(lambda: all_free(pair.prefill))


def test_a_refused_request_releases_its_ticket(pair: Pair) -> None:
    prompt = prompt_of(20)
    with pytest.raises(ValueError, match="more than"):
        ask(pair.decode, prompt, 100_000, pair.ticket(prompt))
    until(lambda: all_free(pair.prefill))


def test_blocks_of_a_cancelled_fetch_are_held_to_its_end(pair: Pair) -> None:
    prompt = prompt_of(30)
    pair.consumer.held = True
    answer = ask(pair.decode, prompt, TOKENS, pair.ticket(prompt))
    until(lambda: pair.consumer.calls)
    held = pair.decode.scheduler.blocks.num_free
    pair.decode.abort(answer.request.id)
    until(lambda: pair.consumer.calls[-1][0] == "cancel")
    # Others go on meanwhile, in other blocks.
    assert ask(pair.decode, prompt, TOKENS).wait().token_ids == pair.expected(prompt)
    assert pair.decode.scheduler.blocks.num_free == held
    pair.consumer.held = False
    assert answer.wait().finish_reason == "abort"
    until(lambda: all_free(pair.decode))


def test_cancelling_while_waiting_releases_the_ticket(model: Path, pair: Pair) -> None:
    narrow, client = pair.start(max_requests=1)
    prompt = prompt_of(20)
    running_answer = ask(narrow, prompt, 3000)
    waiting = ask(narrow, prompt, TOKENS, pair.ticket(prompt))
    narrow.abort(waiting.request.id)
    assert waiting.wait().finish_reason == "abort"
    assert [name for name, _ in client.calls] == ["release"]
    narrow.abort(running_answer.request.id)
    assert _reason(running_answer) == "abort"
    until(lambda: all_free(narrow) and all_free(pair.prefill))


def test_cancelling_after_the_answer_withdraws_the_offer(pair: Pair) -> None:
    answer = ask(pair.prefill, prompt_of(20), 1, REMOTE_DECODE)
    assert answer.wait().kv_transfer_params is not None
    assert not all_free(pair.prefill)
    pair.prefill.abort(answer.request.id)
    until(lambda: all_free(pair.prefill))


def test_a_sidecar_that_takes_no_offers(pair: Pair) -> None:
    pair.producer.refuses = True
    answer = ask(pair.prefill, prompt_of(20), 1, REMOTE_DECODE).wait()
    assert answer.kv_transfer_params is None
    assert answer.kv_transfer is not None
    assert answer.kv_transfer["failed"] == "draining"
    until(lambda: all_free(pair.prefill))


def _reason(answer: Answer) -> str | None:
    return answer.wait().finish_reason

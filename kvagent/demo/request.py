"""A request as the engine sees it: what it asks for, how far it is, what it has to say."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor

from kvagent.demo.tokenizer import TextStream

__all__ = ["Output", "Request", "Sampling", "State"]


class State(enum.Enum):
    """`FETCHING` is the one that disaggregation adds: the KV of the prompt is on its way."""

    WAITING = enum.auto()
    FETCHING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens and when to stop. Temperature 0 is greedy."""

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Output:
    """What a step adds to an answer. The last one has a `finish_reason`: "stop", "length",
    "abort" or "error"; and then `kv_transfer_params` (the ticket) and `kv_transfer` if any."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    kv_transfer: Mapping[str, Any] | None = None


@dataclass(eq=False)
class Request:
    """`emit` is called on the engine's thread. `kv_transfer_params` as in vLLM: either
    `do_remote_decode` (offer the prompt's KV when done) or a ticket (fetch it)."""

    id: str
    prompt: list[int]
    sampling: Sampling
    stream: TextStream
    emit: Callable[[Output], None]
    kv_transfer_params: Mapping[str, Any] = field(default_factory=dict)

    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    cancelled: bool = False
    kv_transfer: dict[str, Any] = field(default_factory=dict)
    """What the answer says about the transfer and the time."""
    started: float = 0.0
    first_token: float = 0.0

    def __post_init__(self) -> None:
        self._generator = torch.Generator()
        if self.sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(self.sampling.seed)

    @property
    def offers(self) -> bool:
        """Somebody else will decode."""
        return bool(self.kv_transfer_params.get("do_remote_decode"))

    @property
    def has_ticket(self) -> bool:
        """Somebody else did the prefill."""
        return bool(self.kv_transfer_params.get("do_remote_prefill"))

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def todo(self) -> int:
        """Tokens to compute until the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def max_cached(self) -> int:
        """Tokens that will be in the cache at most; the last one sampled never gets there."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    def tokens(self, start: int, stop: int) -> list[int]:
        """Prompt and output, as one sequence."""
        return (self.prompt + self.output)[start:stop]

    def sample(self, logits: Tensor) -> int:
        """The next token, from logits `[vocabulary]`."""
        if self.sampling.temperature <= 0:
            return int(logits.argmax())
        weights = torch.softmax(logits.float().cpu() / self.sampling.temperature, dim=-1)
        return int(torch.multinomial(weights, 1, generator=self._generator))

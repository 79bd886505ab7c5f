"""A tiny random Llama checkpoint, and engines in the test process that answer prompts."""

from __future__ import annotations

import itertools
import json
import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvagent.demo.config import EngineOptions
from kvagent.demo.engine import Engine
from kvagent.demo.request import Output, Request, Sampling
from kvagent.demo.tokenizer import TextStream

ANSWER_SECONDS = 60.0
"""A bound against hangs only."""

TINY: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 259,  # divides by none of the TP sizes, like the MLP
    "hidden_size": 48,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 100000,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def write_tiny(path: Path, **changes: Any) -> Path:
    """A Hugging Face directory; `changes` are to its `config.json`."""
    config = {**TINY, **changes}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * 1.5 * columns**-0.5

    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads = config["num_attention_heads"] * config["head_dim"]
    kv_heads = config["num_key_value_heads"] * config["head_dim"]
    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden),
        "model.norm.weight": _norm(hidden, random),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": _norm(hidden, random),
            f"{layer}.self_attn.q_proj.weight": matrix(heads, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads),
            f"{layer}.post_attention_layernorm.weight": _norm(hidden, random),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
    names = list(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, path / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, **index}))
    _write_tokenizer(path / "tokenizer.json")
    return path


def _norm(size: int, random: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, generator=random)


def _write_tokenizer(path: Path) -> None:
    """One token per byte, and three special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<{name}>") for name in ("bos", "eos", "pad")])
    tokenizer.save(str(path))


@dataclass
class Answer:
    """What an engine said to one request."""

    request: Request
    outputs: queue.SimpleQueue[Output] = field(default_factory=queue.SimpleQueue)

    def wait(self) -> Output:
        """All of it as one output."""
        parts = [self.outputs.get(timeout=ANSWER_SECONDS)]
        while parts[-1].finish_reason is None:
            parts.append(self.outputs.get(timeout=ANSWER_SECONDS))
        return Output(
            text="".join(part.text for part in parts),
            token_ids=tuple(itertools.chain.from_iterable(part.token_ids for part in parts)),
            finish_reason=parts[-1].finish_reason,
            kv_transfer_params=parts[-1].kv_transfer_params,
            kv_transfer=parts[-1].kv_transfer,
        )


_ids = itertools.count()


def ask(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int = 12,
    params: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Answer:
    """Submits a request; greedy and without an end of text unless `sampling` says otherwise."""
    wanted = Sampling(max_tokens=max_tokens, **{"ignore_eos": True, **sampling})
    answer_queue: queue.SimpleQueue[Output] = queue.SimpleQueue()
    request = Request(
        id=f"r{next(_ids)}",
        prompt=list(prompt),
        sampling=wanted,
        stream=TextStream(engine.tokenizer, wanted.stop),
        emit=answer_queue.put,
        kv_transfer_params=params or {},
    )
    engine.submit(request)
    return Answer(request, answer_queue)


@contextmanager
def running(model: Path, **options: Any) -> Iterator[Engine]:
    """A started engine on its own, unless the options name a sidecar."""
    settings = {"num_blocks": 256, "block_size": 16, "device": "cpu", **options}
    engine = Engine(EngineOptions(model=str(model), **settings))
    try:
        engine.start()
        yield engine
    finally:
        engine.close()

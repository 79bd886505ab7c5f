"""Loads one rank's share of a checkpoint, as float32.

A checkpoint is a Hugging Face directory with safetensors or a GGUF file; both answer with rows of
a tensor by its Hugging Face name, so that a rank reads and dequantizes little more than it keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import safe_open
from torch import Tensor

from kvagent.demo.config import ModelConfig
from kvagent.demo.gguf_file import GGUFFile
from kvagent.demo.tp import Shard
from kvagent.errors import ConfigError

__all__ = ["Checkpoint", "LayerWeights", "Weights", "load_weights", "open_checkpoint"]


class Checkpoint(Protocol):
    """What the loader needs of a file format."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def revision(self) -> str:
        """Changes with the contents, as far as names, shapes and sizes tell."""
        ...

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """float32 rows of a tensor, by its Hugging Face name."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One layer's share; `qkv` and `gate_up` are the projections one above the other."""

    input_norm: Tensor
    qkv: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor


def open_checkpoint(path: Path) -> Checkpoint:
    """A directory with `config.json`, or a `.gguf` file; anything else is a `ConfigError`."""
    if (path / "config.json").is_file():
        return HFCheckpoint(path)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFCheckpoint(path)
    raise ConfigError(f"{path} is neither a directory with a config.json nor a .gguf file")


def load_weights(checkpoint: Checkpoint, shard: Shard, device: torch.device) -> Weights:
    """Reads what `shard` holds; `[rows, columns]` as in `torch.nn.Linear`."""
    config = checkpoint.config
    heads, kv_heads = (
        (a * config.head_size, b * config.head_size) for a, b in (shard.heads, shard.kv_heads)
    )
    whole = (0, config.hidden_size)

    def rows(name: str, *spans: tuple[str, tuple[int, int]]) -> Tensor:
        parts = [checkpoint.rows(f"{name}{part}.weight", *span) for part, span in spans]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).to(device)

    def columns(name: str, span: tuple[int, int]) -> Tensor:
        full = checkpoint.rows(f"{name}.weight", *whole)
        return full[:, span[0] : span[1]].contiguous().to(device)

    def layer(prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}.self_attn.", f"{prefix}.mlp."
        return LayerWeights(
            input_norm=rows(prefix, (".input_layernorm", whole)),
            qkv=rows(attention, ("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)),
            output=columns(f"{attention}o_proj", heads),
            mlp_norm=rows(prefix, (".post_attention_layernorm", whole)),
            gate_up=rows(mlp, ("gate_proj", shard.intermediate), ("up_proj", shard.intermediate)),
            down=columns(f"{mlp}down_proj", shard.intermediate),
        )

    embedding = rows("model.", ("embed_tokens", shard.vocab))
    tied = config.tied_embeddings
    return Weights(
        embedding=embedding,
        layers=[layer(f"model.layers.{index}") for index in range(config.num_layers)],
        norm=rows("model.", ("norm", whole)),
        head=embedding if tied else rows("", ("lm_head", shard.vocab)),
    )


class HFCheckpoint:
    """A directory with `config.json` and `*.safetensors`."""

    def __init__(self, path: Path) -> None:
        raw = _read_json(path / "config.json")
        generation = path / "generation_config.json"
        self.config = ModelConfig.from_hf(
            path.name, raw, _read_json(generation) if generation.is_file() else {}
        )
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"{path} has no .safetensors file")
        self._open = ExitStack()
        self._slices: dict[str, Callable[[str], Any]] = {}
        for file in files:
            tensors = self._open.enter_context(safe_open(file, framework="pt"))
            self._slices.update(dict.fromkeys(tensors.keys(), tensors.get_slice))
        self.revision = _digest(self.config, [(f.name, f.stat().st_size) for f in files])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._slices:
            raise ConfigError(f"{self.config.name} has no tensor {name!r}")
        values: Tensor = self._slices[name](name)[start:stop]
        return values.float()


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFCheckpoint:
    """A GGUF file of the llama architecture."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        tensors = self._file.tensors
        if "rope_freqs.weight" in tensors:
            raise ConfigError(f"{path} scales its rotary frequencies, which is not supported")
        self.config = ModelConfig.from_gguf(
            self._file.metadata, has_output="output.weight" in tensors
        )
        self.revision = _digest(
            self.config, [(name, t.shape, t.kind.name) for name, t in sorted(tensors.items())]
        )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        values = torch.from_numpy(self._file.rows(_gguf_name(name), start, stop))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            return self._unpermuted(values)
        return values

    def _unpermuted(self, rows: Tensor) -> Tensor:
        """GGUF keeps the rows of q and k so that the two halves of a rotary pair are neighbours;
        Hugging Face keeps all first halves of a head before all second ones."""
        pairs = rows.reshape(-1, self.config.head_size // 2, 2, rows.shape[1])
        return pairs.transpose(1, 2).reshape(rows.shape)


def _gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_GGUF_NAMES[stem]}.{suffix}"
    index, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_GGUF_NAMES[part]}.{suffix}"


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])


def _digest(config: ModelConfig, contents: object) -> str:
    return hashlib.sha256(msgspec.json.encode((config, contents))).hexdigest()[:16]

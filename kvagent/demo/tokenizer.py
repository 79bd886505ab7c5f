"""Text to token ids and back, one token at a time.

From a Hugging Face `tokenizer.json`, or built from a GGUF file's metadata. Byte-level BPE only:
the kinds whose splitting is known are listed, others are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from kvagent.demo.gguf_file import GGUFFile
from kvagent.errors import ConfigError

__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UNFINISHED = "\ufffd"  # what the decoder makes of a character whose bytes are not all there


class Tokenizer:
    """`bos` is put before every text that is encoded, None for none."""

    def __init__(self, backend: Backend, bos: int | None) -> None:
        self._backend = backend
        self._bos = bos

    def encode(self, text: str) -> list[int]:
        """Token ids; the names of special tokens in the text become those tokens."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=self._bos is None).ids
        return ids if self._bos is None else [self._bos, *ids]

    def decode(self, ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text


class TextStream:
    """The text of one answer as its tokens come in, cut at the first of the `stop` strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [text for text in stop if text]
        self._ids: list[int] = []
        self._text = ""
        self._sent = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is now certain; sets `stopped` when a stop string is complete."""
        self._ids.append(token)
        self._text = self._tokenizer.decode(self._ids)
        found = [at for at in map(self._text.find, self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._text = self._text[: min(found)]
            return self._take(len(self._text))
        return self._take(len(self._text) - self._held())

    def finish(self) -> str:
        """What was held back, once no more tokens come."""
        return self._take(len(self._text))

    def _take(self, end: int) -> str:
        end = max(end, self._sent)
        start, self._sent = self._sent, end
        return self._text[start:end]

    def _held(self) -> int:
        """Characters at the end that may still change or turn out to begin a stop string."""
        certain = self._text.rstrip(_UNFINISHED)
        begun = (
            length
            for stop in self._stop
            for length in range(1, len(stop))
            if certain.endswith(stop[:length])
        )
        return len(self._text) - len(certain) + max(begun, default=0)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of the checkpoint at `path`."""
    if path.is_dir():
        file = path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{path} has no tokenizer.json")
        return Tokenizer(Backend.from_file(str(file)), bos=None)
    return _from_gguf(path.name, GGUFFile(path).metadata)


def _from_gguf(name: str, metadata: dict[str, Any]) -> Tokenizer:
    def field(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, split = field("model"), field("pre", "gpt-2")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        raise ConfigError(
            f"{name}: tokenizer {kind!r} with pre-tokenizer {split!r}; from a GGUF file only "
            f"'gpt2' with one of {', '.join(_PRE_TOKENIZERS)} can be built. "
            "Use the Hugging Face directory of the model"
        )
    tokens: list[str] = field("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in field("merges")]
    backend = Backend(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[split])
    backend.decoder = decoders.ByteLevel()
    types = field("token_type")
    for wanted in (_CONTROL, _USER_DEFINED):
        added = [t for t, kind in zip(tokens, types, strict=True) if kind == wanted]
        backend.add_tokens(
            [AddedToken(t, special=wanted == _CONTROL, normalized=False) for t in added]
        )
    return Tokenizer(backend, bos=field("bos_token_id") if field("add_bos_token", False) else None)


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_PRE_TOKENIZERS: dict[str, list[Any]] = {
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES],
}

"""Strict reading of tables that people write: errors name the place, and what may be meant.

Everything wrong is a `ConfigError`. `where` is the file and the key, for messages.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from kvagent.errors import ConfigError, GeometryError

__all__ = ["check_choice", "check_keys", "convert"]


def check_keys(table: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Refuse keys that are not known."""
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}{_hint(key, known)}")


def check_choice(value: str, known: Collection[str], where: str) -> str:
    """Refuse a word that is not known."""
    if value not in known:
        raise ConfigError(f"{where}: {value!r} is none of {', '.join(known)}{_hint(value, known)}")
    return value


def _hint(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def convert(value: Any, kind: type[Any], where: str) -> Any:
    """`msgspec.convert`, with errors in words."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text, re.DOTALL)
        what, key = found.groups() if found else (text, "")
        place = f"{where}.{key}" if key else where
        raise ConfigError(f"{place}: {what[0].lower()}{what[1:]}") from error
    except GeometryError as error:
        raise ConfigError(f"{where}: {error}") from error

"""All settings for people: `kvagent config`, and the table in the README."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import msgspec

from kvagent.config import Config, Effective
from kvagent.settings import Setting, settings_of

__all__ = ["settings_markdown", "show_config"]


def show_config(effective: Effective, *, as_json: bool) -> None:
    """Print every setting's value and where it came from."""
    rows = [
        (name, _value(effective.config, name), effective.sources[name])
        for name in settings_of(Config)
    ]
    if as_json:
        values = {name: {"value": value, "source": source} for name, value, source in rows}
        print(msgspec.json.encode(values).decode())
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("setting", "value", "from")
    for name, value, source in rows:
        style = "dim" if source == "default" else None
        table.add_row(name, escape(_plain(value)), escape(source), style=style)
    Console().print(table)


def settings_markdown() -> str:
    """The README's table. Settings in a row that mean the same share a line."""
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for (meaning, default), group in groupby(settings_of(Config).values(), _alike):
        names = ", ".join(f"`{setting.name}`" for setting in group)
        lines.append(f"| {names} | {default} | {meaning} |")
    return "\n".join(lines)


def _alike(setting: Setting) -> tuple[str, str]:
    words = _words(setting.name, setting.default)
    is_number = type(setting.default) in (int, float)
    return setting.meaning, words if is_number or not words else f"`{words}`"


def _value(config: Config, name: str) -> Any:
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _words(name: str, value: Any) -> str:
    """A default as the README shows it; nothing for what is empty."""
    if name.endswith("_bytes") and value and value % (1 << 20) == 0:
        return f"{value >> 20} MiB"
    if isinstance(value, float):
        return f"{value:g}"
    return "" if value == () else _plain(value)

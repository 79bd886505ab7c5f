"""A struct as settings: where each value came from, and what each one means.

A setting is a field of a msgspec struct. It is described by the string below it in the source; one
without a string is described by that of its struct. A field that is itself a struct is a section:
its fields are settings named `section.field`, a table of the TOML file, and the variables
`KVAGENT_SECTION_FIELD`. Which settings there are: `config`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from kvagent.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["PREFIX", "Layer", "Setting", "build", "read_environ", "read_file", "settings_of"]

PREFIX = "KVAGENT_"
NO_SETTINGS = ("KVAGENT_CONFIG", "KVAGENT_TORCH", "KVAGENT_VLLM", "KVAGENT_ARTEFACTS")
"""Variables with our prefix that are no settings: the file, and those of scripts and tests."""

_SERVICE_LINK = re.compile(
    r"KVAGENT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?"
    r"|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What Kubernetes puts into every pod for a service whose name begins with kvagent."""

T = TypeVar("T", bound=msgspec.Struct)


class Setting(NamedTuple):
    """`name` has a dot when it is in a section; `meaning` is one line."""

    name: str
    type: Any
    default: Any
    meaning: str

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.name.replace(".", "_").upper()


class Layer(NamedTuple):
    """Values by the settings' names, and the words for where each came from."""

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str) -> Layer:
        """`source` may hold `{}`, for the setting's name."""
        return cls(values, {name: source.format(name) for name in values})


@lru_cache(maxsize=8)
def settings_of(cls: type[msgspec.Struct]) -> dict[str, Setting]:
    """All settings by name, in the order in which they are declared."""
    found: dict[str, Setting] = {}
    meanings = _meanings(cls)
    for field in msgspec.structs.fields(cls):
        if _is_section(field.type):
            for inner in settings_of(field.type).values():
                name = f"{field.name}.{inner.name}"
                found[name] = inner._replace(name=name)
        else:
            meaning = meanings.get(field.name, one_line(cls.__doc__ or ""))
            found[field.name] = Setting(field.name, field.type, field.default, meaning)
    return found


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _meanings(cls: type[msgspec.Struct]) -> dict[str, str]:
    """The string that follows each field in the source, as one line."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    except OSError:  # installed without sources
        return {}
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in pairwise(body.body):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            found[field.target.id] = one_line(text.value.value)
    return found


def one_line(text: str) -> str:
    return " ".join(text.split()).removesuffix(".")


# ---------------------------------------------------------------- where values come from


def read_file(cls: type[msgspec.Struct], path: str) -> Layer:
    """The settings in a TOML file. Raises `ConfigError`."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path!r}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path!r} is not TOML: {error}") from error
    return Layer.of(flatten(cls, values, path), path)


def flatten(cls: type[msgspec.Struct], values: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Values by the settings' names, from nested ones. Raises `ConfigError` for a name that is no
    setting."""
    found: dict[str, Any] = {}
    known = settings_of(cls)
    sections = {name.split(".")[0] for name in known if "." in name}
    for key, value in values.items():
        if key in sections:
            inner = msgspec.to_builtins(value) if isinstance(value, msgspec.Struct) else value
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{key} in {source} is a section, [{key}], and no value")
            found |= {f"{key}.{name}": each for name, each in inner.items()}
        else:
            found[key] = value
    for name in found:
        if name not in known:
            raise ConfigError(f"unknown setting {name!r} in {source}{_hint(name, [*known])}")
    return found


def read_environ(cls: type[msgspec.Struct], environ: Mapping[str, str]) -> Layer:
    """The settings in environment variables. Raises `ConfigError`."""
    known = {setting.variable: setting for setting in settings_of(cls).values()}
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in NO_SETTINGS:
            continue
        setting = known.get(variable)
        if setting is not None:
            values[setting.name] = _value(setting, text)
        elif not _SERVICE_LINK.fullmatch(variable):
            raise ConfigError(
                f"unknown setting: environment variable {variable}"
                + _hint(variable, [*known], len(PREFIX))
            )
    return Layer(values, {name: settings_of(cls)[name].variable for name in values})


def _value(setting: Setting, text: str) -> Any:
    """Text as the setting's type: a plain value as it stands, a list as TOML writes it."""
    kind = get_args(setting.type)[0] if get_origin(setting.type) is Annotated else setting.type
    if kind is str:
        return text
    try:
        if kind in (bool, int, float):
            return msgspec.convert(text, kind, strict=False)
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f'{setting.variable}={text!r}: write a list as TOML does, for instance ["tcp"]'
        ) from error
    except (msgspec.ValidationError, KeyError) as error:
        raise ConfigError(f"{setting.variable}={text!r}: {error}") from error


def _hint(name: str, known: Sequence[str], prefix: int = 0) -> str:
    """`prefix`: so many characters all names have in common."""
    alike = {other[prefix:]: other for other in known}
    close = [alike[each] for each in difflib.get_close_matches(name[prefix:], alike, 1)]
    return f"; did you mean {close[0]!r}?" if close else ""


# ---------------------------------------------------------------- putting them together


def build(cls: type[T], layers: Sequence[Layer]) -> tuple[T, dict[str, str]]:
    """The struct, and where each setting came from. A later layer goes before an earlier one.

    Raises `ConfigError` for a value of the wrong type, with its source.
    """
    values: dict[str, Any] = {}
    sources = dict.fromkeys(settings_of(cls), "default")
    for layer in layers:
        values |= layer.values
        sources |= layer.sources
    nested: dict[str, Any] = {}
    for name, value in values.items():
        try:
            converted = msgspec.convert(value, settings_of(cls)[name].type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name} = {value!r}, from {sources[name]}: {error}") from error
        section, dot, field = name.partition(".")
        if dot:
            nested.setdefault(section, {})[field] = converted
        else:
            nested[name] = converted
    return msgspec.convert(nested, cls), sources

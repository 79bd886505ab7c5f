"""The names that users import: guarded here, so that none changes by accident."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import kvagent
from kvagent import EmbeddedAgent, EngineClient, WorkerClient

PUBLIC = [
    "ConvPart",
    "EmbeddedAgent",
    "EngineClient",
    "EngineTransferInfo",
    "FullAttentionSpec",
    "KVConnectorOutput",
    "KVOutputAggregator",
    "MLASpec",
    "MambaSpec",
    "ModelInfo",
    "ScaleSpec",
    "TokenShard",
    "TransferTopology",
    "WorkerClient",
    "WorkerInfo",
]


def test_names() -> None:
    assert sorted(kvagent.__all__) == PUBLIC
    for name in kvagent.__all__:
        assert getattr(kvagent, name).__name__ == name


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'kvagent' has no attribute 'Sidecar'"):
        _ = kvagent.Sidecar


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    return done.stdout.strip()


def test_names_load_on_first_use() -> None:
    """`import kvagent` is free; what only describes memory needs neither torch nor NIXL."""
    heavy = "[m for m in ('torch', 'nixl', 'numpy', 'zmq', 'msgspec') if m in sys.modules]"
    assert python(f"import kvagent, sys; print({heavy})") == "[]"
    code = f"""
import sys
from kvagent import FullAttentionSpec, KVConnectorOutput, ModelInfo, TransferTopology, WorkerInfo
print([m for m in {heavy} if m in ('torch', 'nixl', 'zmq')])
"""
    assert python(code) == "[]"


@pytest.mark.parametrize("module", ["kvagent.wire.local", "kvagent.client.engine"])
def test_a_scheduler_needs_no_nixl(module: str) -> None:
    assert python(f"import {module}, sys; print('nixl' in sys.modules)") == "False"


# ---------------------------------------------------------------- one API, two places


def public(cls: type) -> dict[str, object]:
    return {name: value for name, value in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize("client", [WorkerClient, EngineClient])
def test_the_embedded_agent_has_the_same_methods(client: type) -> None:
    embedded = public(EmbeddedAgent)
    for name, value in public(client).items():
        mine = embedded.get(name)
        assert type(mine) is type(value), name
        if callable(value):
            assert callable(mine)
            assert inspect.signature(mine) == inspect.signature(value), name


def test_the_embedded_agent_has_no_others() -> None:
    assert set(public(EmbeddedAgent)) == set(public(WorkerClient)) | set(public(EngineClient))


def test_every_public_method_says_what_it_does() -> None:
    for cls in (WorkerClient, EngineClient, EmbeddedAgent):
        for name, value in public(cls).items():
            assert inspect.getdoc(value), f"{cls.__name__}.{name}"


# ---------------------------------------------------------------- what is not there


def test_no_pickle() -> None:
    """Nor what is pickle under another name."""
    banned = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
    banned_calls = {"get_serialized_descs", "deserialize_descs"}
    root = Path(kvagent.__file__).parent
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(alias.name for alias in node.names)]
            elif isinstance(node, ast.Attribute):
                assert node.attr not in banned_calls, path
            assert not banned & {name.split(".")[0] for name in names}, path

"""Mooncake's TransferEngine over TCP, asked to move what a fetch of ours moves.

It is installed from PyPI into a virtual environment of its own, in the user's cache folder; what
runs there is `mooncake_rank`. Its wheel wants libibverbs, also for TCP: where the system has none,
the copy that NIXL's wheel brings along does.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvagent.bench import mooncake_rank
from kvagent.bench.shapes import Workload
from kvagent.bench.world import Helper, World
from kvagent.errors import KVAgentError

__all__ = ["Mooncake", "install"]

VERSION = "0.3.13.post1"
PACKAGE = f"mooncake-transfer-engine-non-cuda=={VERSION}"


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "kvagent" / f"mooncake-{VERSION}"


def install() -> Path:
    """Its Python; installs it the first time. Raises `KVAgentError` with pip's last words."""
    home = _home()
    python = home / "bin" / "python"
    done = home / "installed"
    if not done.exists():
        commands = (
            [sys.executable, "-m", "venv", "--clear", str(home)],
            [str(python), "-m", "pip", "install", "--quiet", PACKAGE],
        )
        for command in commands:
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise KVAgentError(f"installing {PACKAGE}: {ran.stderr.strip()[-500:]}")
        done.touch()
    return python


def _library_path() -> str:
    """Where `libibverbs.so.1` is to be found, too."""
    nixl = importlib.util.find_spec("nixl")  # not imported: it loads UCX
    assert nixl is not None
    assert nixl.origin is not None
    found = sorted(Path(nixl.origin).parent.parent.glob("nixl_cu1*.libs/libibverbs-*.so.1*"))
    folder = _home() / "libraries"
    folder.mkdir(exist_ok=True)
    link = folder / "libibverbs.so.1"
    if not found:
        return str(folder)
    link.unlink(missing_ok=True)
    link.symlink_to(found[0])
    return f"{folder}:{found[0].parent}"


class Mooncake:
    """Two of its engines, one at each side. One rank each; what matters of the workload are the
    bytes and the length of the runs."""

    def __init__(self, world: World, workload: Workload) -> None:
        python, env = install(), {"LD_LIBRARY_PATH": _library_path()}
        command = [str(python), "-I", str(Path(mooncake_rank.__file__))]
        near, far, length, nbytes = _runs(workload)
        self._helpers: list[Helper] = []
        try:
            names = []
            for side in ("producer", "consumer"):
                self._helpers.append(world.helper(side, command, **env))
                start = {"host": world.address(side), "nbytes": nbytes}
                names.append(self._helpers[-1].ask(start, dict[str, str | int]))
            self._reader = self._helpers[-1]
            question = {"source": names[0], "near": near, "far": far, "length": length}
            self._reader.ask(question, dict[str, float])
        except BaseException:
            self.close()
            raise

    def read(self) -> float:
        """Seconds."""
        return self._reader.ask({"read": True}, dict[str, float])["seconds"]

    def close(self) -> None:
        for helper in self._helpers:
            helper.close()


def _runs(workload: Workload) -> tuple[list[int], list[int], int, int]:
    """Offsets on both sides, the bytes of each run, and those of the memory: every region's
    blocks one after the other, neighbours merged when they are on both sides."""
    shape = workload.shape
    regions = (1 if shape.latent else 2) * shape.layers
    per_block = shape.bytes_per_token() * workload.block_size // regions
    near = np.arange(workload.num_blocks)
    far = workload.fragmentation.table(workload.num_blocks).astype(np.int64)
    starts = np.flatnonzero(np.diff(far, prepend=-2) != 1)
    sizes = np.diff(np.append(starts, len(far)))
    step = int(np.gcd.reduce(sizes))
    picked = near[::step]
    region = np.arange(regions)[:, None] * workload.num_blocks
    return (
        ((region + picked) * per_block).ravel().tolist(),
        ((region + far[picked]) * per_block).ravel().tolist(),
        step * per_block,
        regions * workload.num_blocks * per_block,
    )

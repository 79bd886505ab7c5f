"""One Mooncake TransferEngine, in its own virtual environment: nothing of kvagent is there.

`python mooncake_rank.py SOCKET` answers JSON lines; see `mooncake`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import socket
import sys
import time
from typing import Any

MOST = 1024
"""Blocks in one batch; larger ones fail."""


class Rank:
    def __init__(self) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

        self._engine = TransferEngine()
        self._target = ""
        self._batches: list[tuple[list[int], list[int], list[int]]] = []

    def start(self, host: str, nbytes: int) -> dict[str, Any]:
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            sys.exit("Mooncake did not start")
        self._memory = mmap.mmap(-1, nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.memset(self._address, 1, nbytes)
        if self._engine.register_memory(self._address, nbytes):
            sys.exit("Mooncake did not register the memory")
        port = self._engine.get_rpc_port()
        return {"target": f"{host}:{port}", "address": self._address}

    def meet(self, source: dict[str, Any], near: list[int], far: list[int], length: int) -> None:
        self._target = source["target"]
        there = source["address"]
        for i in range(0, len(near), MOST):
            ours = [self._address + offset for offset in near[i : i + MOST]]
            theirs = [there + offset for offset in far[i : i + MOST]]
            self._batches.append((ours, theirs, [length] * len(ours)))

    def read(self) -> float:
        begin = time.perf_counter()
        for batch in self._batches:
            if self._engine.batch_transfer_sync_read(self._target, *batch):
                sys.exit("a batch failed")
        return time.perf_counter() - begin


def main(path: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    rank = Rank()
    with connection.makefile("rw") as file:
        for line in file:
            question = json.loads(line)
            answer: dict[str, Any] = {}
            if "host" in question:
                answer = rank.start(**question)
            elif "source" in question:
                rank.meet(**question)
            else:
                answer = {"seconds": rank.read()}
            file.write(json.dumps(answer) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[-1])

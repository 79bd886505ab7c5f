"""A worker of a soak's engine: joins its rank's sidecar, registers the cache, and that is all.

It runs in a process of its own, to be killed at any moment; the cache outlives it.
"""

from __future__ import annotations

import logging
import os
import sys
from multiprocessing.connection import Connection

from kvagent import WorkerClient, WorkerInfo
from kvagent.errors import KVAgentError
from kvagent.soak.messages import Join, Pipe, Up
from kvagent.soak.shapes import LAYER_NAMES, MODEL, RankMemory, Shape

START_SECONDS = 60.0
AGAIN_SECONDS = 0.1


def run_worker(
    connection: Connection, log: str, shape: Shape, rank: int, path: str, socket: str, leader: str
) -> None:
    """Joins, and joins again whenever it is told that its sidecar is another one."""
    log_to(log)
    pipe: Pipe[Join] = Pipe(connection, Join)
    memory = RankMemory(shape, path)
    info = WorkerInfo(
        engine_id=shape.name,
        tp_rank=rank,
        tp_size=shape.tp,
        leader=leader if rank else None,
        model=MODEL,
    )
    client: WorkerClient | None = None
    refusals: list[str] = []
    while True:
        if client is not None:
            client.close()
        try:
            try:
                client = WorkerClient(socket, timeout=START_SECONDS)
                client.join(info)
                client.register_kv_caches(memory.tensors, dict.fromkeys(LAYER_NAMES, shape.spec()))
            except KVAgentError as error:
                refusals.append(str(error))
                if pipe.waits(AGAIN_SECONDS):
                    pipe.receive()
                continue
            pipe.send(Up(refusals))
            refusals = []
            pipe.receive()
        except (EOFError, OSError):
            return  # the soak is over


def log_to(path: str) -> None:
    """A process that ends by itself leaves its trace there."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(fd, number)
    os.close(fd)
    logging.basicConfig(stream=sys.stderr, level="INFO")

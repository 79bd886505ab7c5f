"""The floor under a small fetch: its chain of processes and threads with nothing in it.

Engine, by unix socket, to a process on uvloop; to a thread there and back; by ZMQ to another
process and back; to the engine. 300 bytes, no read, no decision. `measure_chain` is the engine;
`python -m kvagent.bench.chain answers|asks ADDRESS` are the others, which end with their parent.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import uvloop
import zmq

__all__ = ["measure_chain"]

MESSAGE = bytes(300)
READ_BYTES = 4096
WARM_UP = 20
START_SECONDS = 60.0


def measure_chain(rounds: int, pause: float) -> float:
    """Median microseconds there and back, after `pause` seconds of rest each time."""
    command = [sys.executable, "-m", "kvagent.bench.chain"]
    with tempfile.TemporaryDirectory(prefix="kvagent-chain-") as folder:
        path = str(Path(folder, "engine.sock"))
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            door.settimeout(START_SECONDS)
            answers = subprocess.Popen(
                [*command, "answers", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert answers.stdout is not None
            address = answers.stdout.readline().decode().strip()
            asks = subprocess.Popen([*command, "asks", path, address], stdin=subprocess.PIPE)
            try:
                engine, _ = door.accept()
                with engine:
                    engine.settimeout(START_SECONDS)
                    times = [_once(engine, pause) for _ in range(WARM_UP + rounds)]
            finally:
                for process in (asks, answers):
                    process.communicate()
    return statistics.median(times[WARM_UP:])


def _once(engine: socket.socket, pause: float) -> float:
    time.sleep(pause)
    begin = time.perf_counter_ns()
    engine.send(MESSAGE)
    engine.recv(READ_BYTES)
    return (time.perf_counter_ns() - begin) / 1000


async def _answers() -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    print(f"tcp://127.0.0.1:{port}", flush=True)

    def look() -> None:
        while int(router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            router.send_multipart(router.recv_multipart())

    asyncio.get_running_loop().add_reader(int(router.getsockopt(zmq.FD)), look)
    await _parent_ends()


async def _asks(path: str, address: str) -> None:
    loop = asyncio.get_running_loop()
    peer = zmq.Context().socket(zmq.DEALER)
    peer.connect(address)
    engine = socket.socket(socket.AF_UNIX)
    engine.connect(path)
    engine.setblocking(False)
    handed: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def work() -> None:
        while True:
            loop.call_soon_threadsafe(ask, handed.get())

    def ask(message: bytes) -> None:
        peer.send(message)
        look()

    def look() -> None:
        while int(peer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            engine.send(peer.recv())

    def take() -> None:
        if message := engine.recv(READ_BYTES):
            handed.put(message)
        else:
            loop.remove_reader(engine)

    threading.Thread(target=work, daemon=True).start()
    loop.add_reader(int(peer.getsockopt(zmq.FD)), look)
    loop.add_reader(engine, take)
    await _parent_ends()


async def _parent_ends() -> None:
    await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    uvloop.run(_asks(*arguments) if role == "asks" else _answers())
    os._exit(0)  # not by way of ZMQ's destructors, which wait for messages that nobody takes

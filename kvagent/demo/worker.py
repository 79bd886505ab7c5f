"""One tensor-parallel rank: its share of the model and its cache; and the processes of all ranks.

Rank 0 lives in the engine's process. Each other rank is a child that reads one line of JSON per
step from its standard input; the end of that pipe, however the parent ended, ends the child. On
its standard output it says that it is ready, and that its sidecar is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from kvagent import WorkerClient
from kvagent.demo.config import EngineOptions, ModelConfig
from kvagent.demo.model import Chunk, Model, PagedCache
from kvagent.demo.tp import Group, Shard
from kvagent.demo.transfer import join_sidecar, layer_names
from kvagent.demo.weights import load_weights, open_checkpoint
from kvagent.errors import ConfigError, KVAgentError

_HOST = "127.0.0.1"
_EXIT_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1
_READY, _LOST = b"ready\n", b"lost\n"


class _Setup(msgspec.Struct, frozen=True):
    """What a child is started with."""

    options: EngineOptions
    rank: int
    store_port: int
    parent: int


class _Start(msgspec.Struct, frozen=True):
    """The first line for a child: rank 0 has joined its sidecar, whose endpoint is `leader`."""

    leader: str | None


class Worker:
    """One rank. `join` after construction, then `model`."""

    def __init__(self, options: EngineOptions, rank: int) -> None:
        torch.set_num_threads(options.threads)
        self._options, self._rank = options, rank
        checkpoint = open_checkpoint(Path(options.model))
        self.config, self._revision = checkpoint.config, checkpoint.revision
        self._shard = Shard.of(self.config, rank, options.tp)
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device {device!r}: this torch sees no GPU; use cpu or auto")
        self._weights = load_weights(checkpoint, self._shard, torch.device(device))
        self._client: WorkerClient | None = None

    def join(self, leader: str | None) -> str | None:
        """Gets the cache, from the sidecar if there is one, and returns that one's endpoint."""
        if self._options.socket_template is None:
            self._tensors = plain_caches(
                self._options, self.config, self._shard, self._weights.norm
            )
            return None
        self._client, self._tensors = join_sidecar(
            self._options,
            self.config,
            self._revision,
            self._rank,
            leader,
            self._weights.norm.device,
        )
        return self._client.endpoint

    def meet(self, store: Store | None) -> None:
        """Builds the model, once all ranks are here."""
        self._group = Group(self._rank, self._options.tp, store)
        caches = [
            PagedCache(self._tensors[name], self._options.axes) for name in layer_names(self.config)
        ]
        self.model = Model(self.config, self._weights, self._shard, self._group, caches)

    @property
    def on_host(self) -> bool:
        """Whether the cache is host memory: that stays ours when the sidecar is gone."""
        return self._weights.norm.device.type == "cpu"

    def tell_when_lost(self, tell: Callable[[], None]) -> None:
        """`tell` is called, on a thread, when this rank's sidecar is gone."""
        client = self._client
        if client is None:
            return

        def wait() -> None:
            client.wait_lost()
            tell()

        threading.Thread(target=wait, name="sidecar", daemon=True).start()

    def close(self) -> None:
        self._group.close()
        if self._client is not None:
            self._client.close()


def plain_caches(
    options: EngineOptions, config: ModelConfig, shard: Shard, like: Tensor
) -> dict[str, Tensor]:
    """Cache tensors of our own, for an engine without a sidecar; on the device of `like`."""
    extents = {
        "kv": 2,
        "block": options.num_blocks,
        "head": shard.kv_heads[1] - shard.kv_heads[0],
        "token": options.block_size,
        "channel": config.head_size,
    }
    shape = [extents[axis] for axis in options.axes]
    dtype: torch.dtype = getattr(torch, options.kv_dtype)
    return {
        name: torch.zeros(shape, dtype=dtype, device=like.device) for name in layer_names(config)
    }


class Workers:
    """All ranks of an engine: rank 0 here, the others in processes of their own.

    Make it in the main thread: the children are told to die with the thread that started them.
    """

    def __init__(self, options: EngineOptions) -> None:
        store = None
        self._children: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        try:
            if options.tp > 1:
                store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
                for rank in range(1, options.tp):
                    setup = _Setup(options, rank, store.port, os.getpid())
                    self._children.append(_start_child(setup))
            self._own = Worker(options, rank=0)
            self._broadcast(_Start(self._own.join(leader=None)))
            for rank, child in enumerate(self._children, start=1):
                assert child.stdout is not None
                if child.stdout.readline() != _READY:
                    raise KVAgentError(f"rank {rank} ended while starting; its error is above")
            self._own.meet(store)
        except BaseException:
            self._end_children(seconds=0.0)
            raise
        self.config = self._own.config

    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """One step on all ranks: logits `[chunks with sample, vocabulary]`."""
        self._broadcast(chunks)
        logits = self._own.model.forward(chunks)
        assert logits is not None
        return logits

    @property
    def on_host(self) -> bool:
        return self._own.on_host

    def watch(self, on_end: Callable[[str], None]) -> None:
        """`on_end` is called, on a thread for each rank above 0, with what has happened: that its
        sidecar is gone, or that it has ended, at last by `close`."""

        def wait(rank: int, child: subprocess.Popen[bytes]) -> None:
            assert child.stdout is not None
            lost = child.stdout.readline() == _LOST
            on_end(f"the sidecar of rank {rank} is gone" if lost else f"rank {rank} has ended")

        for each in enumerate(self._children, start=1):
            thread = threading.Thread(target=wait, args=each, name=f"rank {each[0]}", daemon=True)
            thread.start()
            self._watchers.append(thread)

    def close(self) -> None:
        self._end_children(_EXIT_SECONDS)
        self._own.close()

    def _broadcast(self, message: object) -> None:
        line = msgspec.json.encode(message) + b"\n"
        for rank, child in enumerate(self._children, start=1):
            assert child.stdin is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
            except BrokenPipeError:
                raise KVAgentError(f"rank {rank} has ended; its error is above") from None

    def _end_children(self, seconds: float) -> None:
        for child in self._children:
            assert child.stdin is not None
            try:
                child.stdin.close()
            except BrokenPipeError:
                pass
        for child in self._children:
            try:
                child.wait(seconds)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for thread in self._watchers:
            thread.join()
        for child in self._children:
            assert child.stdout is not None
            child.stdout.close()


def _start_child(setup: _Setup) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "kvagent.demo.worker", msgspec.json.encode(setup).decode()]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def main() -> None:
    """A rank above 0."""
    setup = msgspec.json.decode(sys.argv[1], type=_Setup)
    _die_with(setup.parent)
    worker = Worker(setup.options, setup.rank)
    first = sys.stdin.buffer.readline()
    if not first:
        return
    worker.join(msgspec.json.decode(first, type=_Start).leader)
    os.write(sys.stdout.fileno(), _READY)
    worker.tell_when_lost(_say_lost)
    worker.meet(TCPStore(_HOST, setup.store_port, is_master=False))
    decoder = msgspec.json.Decoder(list[Chunk])
    for line in sys.stdin.buffer:
        worker.model.forward(decoder.decode(line))
    worker.close()


def _say_lost() -> None:
    # Not `print`: a thread must not hold its lock while the process ends.
    os.write(sys.stdout.fileno(), _LOST)


def _die_with(parent: int) -> None:
    """Ctrl-C reaches the whole process group, but it is the parent that says when to end. Should
    it be killed while we compute, we are killed too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")


if __name__ == "__main__":
    try:
        main()
    except KVAgentError as error:
        sys.exit(f"rank failed: {type(error).__name__}: {error}")

"""The ceilings: the same bytes by NIXL alone, by `process_vm_readv` and by a plain TCP stream.

`python -m kvagent.bench.raw SOCKET` is one rank, in a process of its own: it has memory, exposes
it, and reads from other ranks what it is told to. What to read comes from our own plan, so that
the descriptors are those of a fetch. Who asks: `ceilings`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from kvagent.bench.questions import (
    BASE,
    NIXL_WAYS,
    Expose,
    Exposed,
    Place,
    Placed,
    Question,
    Read,
    Sources,
    Timing,
    Way,
)
from kvagent.core.regions import MemoryRange
from kvagent.core.runs import coalesce
from kvagent.errors import FabricError
from kvagent.fabric.agent import NixlAgent, PreparedLists
from kvagent.fabric.pieces import NO_EXTRA, Piece, Rows
from kvagent.fabric.segments import own_segments
from kvagent.memory.host import HostMemory

__all__ = ["RawRank"]

MAX_IOV = 1024
MAX_COPY = 1 << 30
_MADV_NOHUGEPAGE = 15


class _DefaultAgent(NixlAgent):
    """What `nixl_agent(name)` of the public API makes."""

    def __init__(self, name: str) -> None:
        from nixl._api import nixl_agent

        self.name = name
        self._api = nixl_agent(name)
        self._agent = self._api.agent
        self._backends = [self._api.backends["UCX"]]

    def destroy(self) -> None:
        self._api = None
        super().destroy()


def _agent(way: Way, *, serving: bool) -> NixlAgent:
    name = f"raw/{way}/{uuid.uuid4().hex}"
    if way == "nixl_default":
        return _DefaultAgent(name)
    segments = None if way == "nixl_plain" else own_segments(os.environ)
    return NixlAgent(name, serving=serving, segments=segments)


class _Ordinary:
    """Private memory without huge pages, faulted in."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(_MADV_NOHUGEPAGE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.bytes[:] = 1
        self.address = self.bytes.ctypes.data


@dataclass
class _Source:
    """One rank to read from; rows are relative to `BASE` still."""

    placed: Placed
    local: npt.NDArray[np.uint64]
    remote: npt.NDArray[np.uint64]
    requests: list[Piece]
    stream: socket.socket

    def rows(self, local: int, remote: int) -> tuple[Rows, Rows]:
        return Rows(_shifted(self.local, local)), Rows(_shifted(self.remote, remote))


def _shifted(rows: npt.NDArray[np.uint64], address: int) -> npt.NDArray[np.uint64]:
    moved = rows.copy()
    moved[:, 0] += np.uint64(address - BASE)
    return moved


class RawRank:
    """The state of the process."""

    def __init__(self) -> None:
        self._nbytes = 0
        self._memory: HostMemory | None = None
        self._ordinary: _Ordinary | None = None
        self._listener: socket.socket | None = None
        self._exposed: NixlAgent | None = None
        self._sources: list[_Source] = []

    def answer(self, question: Question) -> object:
        match question:
            case Place():
                return self._place(question)
            case Expose():
                return self._expose(question.way)
            case Sources():
                self._meet(question)
                return True
            case Read():
                return Timing(self._read(question))

    def _place(self, question: Place) -> Placed:
        """What was there before goes away."""
        self._expose("")
        if self._memory is not None:
            self._memory.close()
        self._ordinary = None
        self._nbytes = question.nbytes
        self._memory = HostMemory(question.nbytes)
        if question.ordinary:
            self._ordinary = _Ordinary(question.nbytes)
        if self._listener is None:
            self._listener = socket.create_server((question.host, 0))
            threading.Thread(target=self._serve, args=(self._listener,), daemon=True).start()
        return Placed(
            os.getpid(),
            self._memory.address,
            self._ordinary.address if self._ordinary else 0,
            question.host,
            self._listener.getsockname()[1],
        )

    def _serve(self, listener: socket.socket) -> None:
        while True:
            stream, _ = listener.accept()
            threading.Thread(target=self._send, args=(stream,), daemon=True).start()

    def _send(self, stream: socket.socket) -> None:
        """As many bytes as are asked for, from the memory, again and again."""
        with stream:
            while asked := stream.recv(8, socket.MSG_WAITALL):
                left, view = int.from_bytes(asked, "big"), self._view()
                while left:
                    stream.sendall(view[: min(left, len(view))])
                    left -= min(left, len(view))

    def _view(self) -> memoryview:
        assert self._memory is not None
        return memoryview((ctypes.c_char * self._nbytes).from_address(self._memory.address))

    def _address(self, way: Way) -> int:
        memory = self._ordinary if way == "nixl_ordinary" else self._memory
        assert memory is not None
        return memory.address

    def _expose(self, way: Way) -> Exposed:
        if self._exposed is not None:
            self._exposed.destroy()
            self._exposed = None
        if way not in NIXL_WAYS:
            return Exposed(b"")
        self._exposed = _agent(way, serving=True)
        self._exposed.register([MemoryRange(self._address(way), self._nbytes)])
        return Exposed(self._exposed.metadata())

    def _meet(self, question: Sources) -> None:
        for source in self._sources:
            source.stream.close()
        self._sources = [
            _Source(
                lists.source,
                np.frombuffer(lists.local_rows, np.uint64).reshape(-1, 5),
                np.frombuffer(lists.remote_rows, np.uint64).reshape(-1, 5),
                [
                    Piece(0, np.frombuffer(a, np.int32), np.frombuffer(b, np.int32), NO_EXTRA)
                    for a, b in lists.requests
                ],
                socket.create_connection((lists.source.host, lists.source.port)),
            )
            for lists in question.lists
        ]

    def _read(self, question: Read) -> float:
        if question.way == "cma":
            return self._copy()
        if question.way == "tcp":
            return self._receive(question.nbytes)
        agent = _agent(question.way, serving=False)
        try:
            return self._transfer(agent, question)
        finally:
            agent.destroy()

    def _transfer(self, agent: NixlAgent, question: Read) -> float:
        here = self._address(question.way)
        agent.register([MemoryRange(here, self._nbytes)])
        work: list[list[tuple[PreparedLists, Piece]]] = [[] for _ in self._sources[0].requests]
        for source, metadata in zip(self._sources, question.metadata, strict=True):
            name = agent.load(metadata)
            agent.connect(name)
            there = source.placed.ordinary
            if question.way != "nixl_ordinary":
                there = source.placed.address
            lists = PreparedLists(name, *source.rows(here, there))
            agent.prepare(lists)
            first = source.requests[0]
            one = Piece(0, first.local_index[:1], first.remote_index[:1], NO_EXTRA)
            _finish(agent, deque([(lists, one)]), 1)  # the connection is made with the first read
            for number, piece in enumerate(source.requests):
                work[number].append((lists, piece))
        queue = deque(part for request in work for part in request)
        begin = time.perf_counter()
        _finish(agent, queue, question.depth * len(self._sources))
        return time.perf_counter() - begin

    def _copy(self) -> float:
        """`process_vm_readv` of the same runs."""
        jobs = [
            (source.placed.pid, local, remote)
            for source in self._sources
            for piece in source.requests
            for local, remote in self._vectors(source, piece)
        ]
        call = ctypes.CDLL(None, use_errno=True).process_vm_readv
        vector = (ctypes.c_void_p, ctypes.c_ulong)
        call.argtypes = (ctypes.c_int, *vector, *vector, ctypes.c_ulong)
        call.restype = ctypes.c_ssize_t
        begin = time.perf_counter()
        for pid, local, remote in jobs:
            count = len(local)
            if call(pid, local.ctypes.data, count, remote.ctypes.data, count, 0) < 0:
                raise FabricError(f"process_vm_readv: {os.strerror(ctypes.get_errno())}")
        return time.perf_counter() - begin

    def _vectors(
        self, source: _Source, piece: Piece
    ) -> list[tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]]:
        """Pairs of `struct iovec` arrays that one call takes."""
        near, far = source.rows(self._address("cma"), source.placed.address)
        runs = coalesce(
            near.addresses(piece.local_index),
            far.addresses(piece.remote_index),
            near.lengths(piece.local_index),
        )
        local, remote, length = (column.astype(np.uint64) for column in runs)
        step = int(min(MAX_IOV, max(1, MAX_COPY // int(length.max()))))
        return [
            (
                np.ascontiguousarray(np.stack([local[i : i + step], length[i : i + step]], axis=1)),
                np.ascontiguousarray(
                    np.stack([remote[i : i + step], length[i : i + step]], axis=1)
                ),
            )
            for i in range(0, len(length), step)
        ]

    def _receive(self, left: int) -> float:
        """So many bytes in one stream, from the first source."""
        view, stream = self._view(), self._sources[0].stream
        begin = time.perf_counter()
        stream.sendall(left.to_bytes(8, "big"))
        while left:
            got = stream.recv_into(view, min(left, self._nbytes), socket.MSG_WAITALL)
            if not got:
                raise FabricError("the stream ended")
            left -= got
        return time.perf_counter() - begin


def _finish(agent: NixlAgent, queue: deque[tuple[PreparedLists, Piece]], depth: int) -> None:
    flying: deque[tuple[int, str]] = deque()
    while queue or flying:
        while queue and len(flying) < depth:
            lists, piece = queue.popleft()
            flying.append((agent.post(lists, piece), lists.remote_name))
        handle, name = flying.popleft()
        if agent.done(handle, name):
            agent.free(handle)
        else:
            flying.append((handle, name))


def main(path: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    rank = RawRank()
    with connection.makefile("rwb") as file:
        for line in file:
            answer = rank.answer(msgspec.json.decode(line, type=Question))
            file.write(msgspec.json.encode(answer) + b"\n")
            file.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[-1])
    except Exception:
        traceback.print_exc()
        os._exit(1)  # not by way of NIXL's destructors, which may hang
    os._exit(0)

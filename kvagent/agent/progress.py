"""How far this rank's reads have got, and by which transport: numbers for people only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvagent.fabric.witness import UNKNOWN, Carried

__all__ = ["Counts", "Progress"]


@dataclass(slots=True)
class Progress:
    """One part: its bytes that have arrived, of `total` (0 until it is known what to read)."""

    peer: str = ""
    address: str = ""
    started: float = 0.0
    total: int = 0
    _direct: int = 0
    _staged: int = 0

    def direct(self, nbytes: int) -> None:
        """On the fabric's thread, and there alone."""
        self._direct += nbytes

    def staged(self, nbytes: int) -> None:
        """On the event loop, and there alone."""
        self._staged += nbytes

    @property
    def done(self) -> int:
        return self._direct + self._staged


@dataclass(slots=True)
class Counts:
    """All parts of one rank since its sidecar started."""

    descriptors: int = 0
    by_transport: Counter[str] = field(default_factory=Counter)
    """Bytes of good reads."""
    _running: dict[str, Progress] = field(default_factory=dict)
    _ended: int = 0

    def start(self, part_id: str, progress: Progress) -> None:
        self._running[part_id] = progress

    def end(self, part_id: str) -> None:
        progress = self._running.pop(part_id, None)
        if progress is not None:
            self._ended += progress.done

    def of(self, part_id: str) -> Progress | None:
        """None when the part does not run."""
        return self._running.get(part_id)

    def running(self) -> Iterator[Progress]:
        return iter(list(self._running.values()))

    def read(self, carried: Carried | None, nbytes: int, descriptors: int) -> None:
        """A read from one source was good."""
        self.by_transport[carried.transport if carried else UNKNOWN] += nbytes
        self.descriptors += descriptors

    @property
    def landed(self) -> int:
        """Bytes that have arrived, those of reads that failed or still go on included."""
        return self._ended + sum(progress.done for progress in self._running.values())

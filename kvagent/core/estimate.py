"""What a read costs, and whether a way through the staging buffer is worth it. Pure numbers.

    seconds = bytes / READ_RATE + descriptors x DESCRIPTOR_SECONDS
            + copied bytes / COPY_RATE + copied runs x COPY_RUN_SECONDS + steps x STEP_SECONDS

The constants are those of shared memory. Over TCP a byte costs 5 times as much (1.47 GB/s) and a
descriptor too (11 us), so that the two routes compare alike, and copying counts for less: what is
worth staging here is worth it there. They decide between routes and promise no time.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Work", "prefer_staging"]

READ_RATE = 7.5e9
"""Bytes per second of long runs: NIXL over UCX, shared memory, 1 MiB descriptors."""
DESCRIPTOR_SECONDS = 2.3e-6
"""One more descriptor, the same measurement: 1.75 GB/s at 4 KiB, 4.05 at 16 KiB."""
COPY_RATE = 10e9
"""Bytes per second of a permutation in host memory, read and write in cache: `scripts/staging`."""
COPY_RUN_SECONDS = 8e-9
"""One more run of a permutation: the same script, runs of 16 to 512 bytes."""
STEP_SECONDS = 150e-6
"""Each filling of the buffer: two hops between threads of 50 to 60 us, and its own first post."""


class Work(NamedTuple):
    """What one route has to do. `copied`: bytes that are moved again, in `runs` runs; `steps`:
    fillings of the staging buffer. The last three are 0 for a direct read."""

    nbytes: int
    descriptors: int
    copied: int = 0
    runs: int = 0
    steps: int = 0

    @property
    def seconds(self) -> float:
        return (
            self.nbytes / READ_RATE
            + self.descriptors * DESCRIPTOR_SECONDS
            + self.copied / COPY_RATE
            + self.runs * COPY_RUN_SECONDS
            + self.steps * STEP_SECONDS
        )


def prefer_staging(direct: Work, staged: Work, run_bytes: int) -> bool:
    """Whether to stage: the direct read's mean run is shorter than `run_bytes`, and staging is
    estimated to be faster."""
    return direct.nbytes < run_bytes * direct.descriptors and staged.seconds < direct.seconds

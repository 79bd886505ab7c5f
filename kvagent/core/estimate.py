"""What a read costs, and whether a way through the staging buffer is worth it. Pure numbers.

    seconds = bytes / READ_RATE + descriptors x DESCRIPTOR_SECONDS
            + copied bytes / COPY_RATE + copied runs x COPY_RUN_SECONDS + steps x STEP_SECONDS

The constants are those of shared memory. Over TCP a byte and a descriptor both cost about five
times as much (1.47 GB/s, 11 us), so the same choice is right, if for a smaller gain. They decide
between two ways and promise no time.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Work", "prefer_staging"]

READ_RATE = 7.5e9
"""Bytes per second of long runs: NIXL over UCX, shared memory, 1 MiB descriptors."""
DESCRIPTOR_SECONDS = 2.3e-6
"""One more descriptor, the same measurement: 1.75 GB/s at 4 KiB, 4.05 at 16 KiB."""
COPY_RATE = 6e9
"""Bytes per second of a permutation in host memory: `scripts/staging`, runs of 4 KiB."""
COPY_RUN_SECONDS = 17e-9
"""One more run of a permutation: the same, runs of 128 and 256 bytes (3.2 and 4.3 GB/s)."""
STEP_SECONDS = 400e-6
"""Each filling of the buffer, from its post to the end of its copy, beside bytes and runs: hops
between three threads. The same; reads of 64 descriptors in all."""


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

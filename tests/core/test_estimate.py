"""The estimate against what was measured, and the choice that follows from it."""

from __future__ import annotations

import pytest

from kvagent.core.estimate import STEP_SECONDS, Work, prefer_staging

MIB = 1 << 20


@pytest.mark.parametrize(
    ("descriptor", "rate"),
    [(4 << 10, 1.75), (16 << 10, 4.05), (64 << 10, 6.48), (256 << 10, 7.53), (1 << 20, 7.5)],
)
def test_direct_reads_are_as_fast_as_measured(descriptor: int, rate: float) -> None:
    """GB/s of 256 MiB in shuffled descriptors over shared memory."""
    nbytes = 256 * MIB
    assert nbytes / Work(nbytes, nbytes // descriptor).seconds / 1e9 == pytest.approx(rate, rel=0.2)


@pytest.mark.parametrize(("run", "rate"), [(128, 3.2), (256, 4.3), (4096, 5.9)])
def test_copies_are_as_fast_as_measured(run: int, rate: float) -> None:
    """GB/s of what is already in the buffer."""
    copy = Work(0, 0, copied=8 * MIB, runs=8 * MIB // run)
    assert 8 * MIB / copy.seconds / 1e9 == pytest.approx(rate, rel=0.2)


def staged(nbytes: int, run: int, steps: int = 1, wanted: int | None = None) -> Work:
    """Reading `nbytes` in runs of 16 KiB, copying what is wanted in runs of `run`."""
    wanted = wanted or nbytes
    return Work(nbytes, nbytes // (16 << 10), wanted, wanted // run, steps)


@pytest.mark.parametrize("run", [64, 128, 512, 2048, 4095])
def test_short_runs_are_staged(run: int) -> None:
    assert prefer_staging(Work(16 * MIB, 16 * MIB // run), staged(16 * MIB, run, 2), 4096)


def test_runs_that_are_long_enough_are_not() -> None:
    direct, other = Work(16 * MIB, 16 * MIB // 128), staged(16 * MIB, 128)
    assert prefer_staging(direct, other, 129)
    assert not prefer_staging(direct, other, 128)
    assert not prefer_staging(Work(16 * MIB, 1024), staged(16 * MIB, 16 << 10), 1 << 30)


def test_the_mean_run_counts() -> None:
    """Few short runs beside long ones are not worth a detour."""
    assert not prefer_staging(Work(16 * MIB, 1024), staged(16 * MIB, 64), 4096)


def test_bytes_that_nobody_wants_count() -> None:
    direct = Work(16 * MIB, 16 * MIB // 2048)
    assert prefer_staging(direct, staged(32 * MIB, 2048, wanted=16 * MIB), 4096)
    assert not prefer_staging(direct, staged(128 * MIB, 2048, wanted=16 * MIB), 4096)


def test_few_descriptors_are_not_worth_a_step() -> None:
    few, many = 100, 1000
    assert not prefer_staging(Work(few * 128, few), staged(few * 128, 128), 4096)
    assert prefer_staging(Work(many * 128, many), staged(many * 128, 128), 4096)
    assert Work(0, 0, steps=3).seconds == pytest.approx(3 * STEP_SECONDS)


def test_nothing_to_read() -> None:
    assert not prefer_staging(Work(0, 0), Work(0, 0), 4096)

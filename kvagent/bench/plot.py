"""The picture: throughput against block size and against concurrency, ours and the ceilings."""

from __future__ import annotations

from collections.abc import Sequence

from kvagent.bench.measure import OURS, Result
from kvagent.bench.show import HEADINGS
from kvagent.errors import ConfigError

__all__ = ["draw", "require_matplotlib"]


def require_matplotlib() -> None:
    """Raises `ConfigError` when it is not installed: better before the measuring than after."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'kvagent[bench]', or pip install matplotlib"
        ) from None


def draw(path: str, by_block: Sequence[Result], by_concurrency: Sequence[Result]) -> None:
    """A PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True, layout="constrained")
    sweeps = (
        ("tokens per block", by_block, [r.workload.block_size for r in by_block]),
        ("fetches at once", by_concurrency, [r.workload.concurrency for r in by_concurrency]),
    )
    for axis, (label, results, places) in zip(axes, sweeps, strict=True):
        for way in results[0].seconds:
            ours = way == OURS
            axis.plot(
                places,
                [result.gbps(way) for result in results],
                marker="o",
                linewidth=3 if ours else 1.2,
                label=OURS if ours else HEADINGS[way],
            )
        axis.set_xscale("log", base=2)
        axis.set_xticks(places, [str(place) for place in places])
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    work = by_block[0].workload
    axes[0].set_ylabel("GB/s")
    axes[0].set_ylim(bottom=0)
    axes[1].legend(fontsize="small")
    nbytes = by_block[0].nbytes / 2**20
    figure.suptitle(
        f"{work.name}, {nbytes:,.0f} MiB, {work.fragmentation.value}, {by_block[0].transport}"
    )
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

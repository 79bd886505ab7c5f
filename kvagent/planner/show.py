"""`kvagent plan`: reads two engines, plans, prints and draws."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvagent.errors import ConfigError
from kvagent.planner.describe import read_description
from kvagent.planner.drawing import plan_svg
from kvagent.planner.report import plan_report
from kvagent.planner.status import fetch_status
from kvagent.planner.table import plan_text

__all__ = ["show_plan"]


def show_plan(
    producer: str,
    consumer: str,
    *,
    from_status: bool = False,
    num_tokens: int | None = None,
    start_token: int = 0,
    as_json: bool = False,
    svg: str | None = None,
) -> bool:
    """Print the plan of two descriptions (paths of TOML files, or URLs of running leaders).

    Returns whether the pair works; only then is the drawing written. Raises `ConfigError`.
    """
    read = fetch_status if from_status else read_description
    report = plan_report(read(producer), read(consumer), num_tokens, start_token)
    if as_json:
        totals = {"works": report.works, "nbytes": report.nbytes}
        print(msgspec.json.encode(totals | msgspec.structs.asdict(report)).decode())
    else:
        print(plan_text(report))
    if svg is not None and report.works:
        try:
            Path(svg).write_text(plan_svg(report), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {svg!r}: {error.strerror}") from error
    return report.works

"""Reports as tables for a terminal. Text is never taken for markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvagent.top.ask import Answer, Lost, PeerRow, Report

__all__ = ["amount", "duration", "overview", "screen"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SPARKS = " ▁▂▃▄▅▆▇█"
SPARK_STEPS = 24
FAILURES = 8


def amount(value: float) -> str:
    """Bytes, in powers of ten."""
    unit = 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit and value < 100 else f"{value:.0f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Seconds, as people say them."""
    if seconds < 1:
        return f"{max(0.0, seconds) * 1e3:.0f} ms"
    for size, unit in ((172800, "d"), (7200, "h"), (120, "min")):
        if seconds >= size:
            return f"{seconds / {'d': 86400, 'h': 3600, 'min': 60}[unit]:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def overview(answers: Sequence[Answer | Lost]) -> Table:
    """One row for each sidecar."""
    table = _table("sidecar", "engine", "rank", "state")
    table.columns[1].max_width = 40
    for title in ("reading", "last 2 min", "fetches", "leases", "blocks used", "failed", "up"):
        table.add_column(title, justify="right", no_wrap=True)
    for answer in answers:
        if isinstance(answer, Lost):
            table.add_row(
                Text(answer.address), "", "", Text(f"lost: {answer.why}", "red"), *[""] * 7
            )
            continue
        report = answer.report
        follower = report.role == "follower"
        blocks = sum(report.ledger.values())
        used = blocks - report.ledger.get("free", 0)
        leases = report.leases.get("offered", 0) + report.leases.get("claimed", 0)
        failed = sum(report.throughput.fetches_failed)
        table.add_row(
            Text(answer.address),
            _name(report.engine_id or "–"),
            _rank(report),
            _state(report),
            f"{amount(report.throughput.rate)}/s",
            Text(_spark(report.throughput.read_bytes), "cyan"),
            f"{report.parts_reading} shares" if follower else str(sum(report.fetches.values())),
            "–" if follower else str(leases),
            f"{100 * used / blocks:.0f} %" if blocks else "–",
            Text(str(failed), "red" if failed else "") if not follower else "–",
            duration(report.uptime_seconds),
        )
    return table


def screen(answers: Sequence[Answer | Lost], height: int) -> Group:
    """The overview, transfers with bars, peers and the newest failures; about `height` lines."""
    found = [answer for answer in answers if isinstance(answer, Answer)]
    parts: list[RenderableType] = [overview(answers)]
    room = max(3, (height - len(answers) - 12) // 2)
    transfers = list(_transfers(found))
    if transfers:
        parts.append(_titled("transfers under way", len(transfers), room))
        table = _table("request", "from", "state", "")
        table.add_column("", justify="right")
        table.add_column("since", justify="right")
        for row in transfers[:room]:
            table.add_row(*row)
        parts.append(table)
    peers = [peer for answer in found for peer in answer.report.peers]
    if peers:
        parts.append(_titled("peers", len(peers), room))
        parts.append(_peers(peers[:room]))
    failures = sorted(
        (failure for answer in found for failure in answer.report.failures),
        key=lambda failure: failure.seconds_ago,
    )
    if failures:
        parts.append(_titled("recent failures", len(failures), FAILURES))
        table = _table("when", "cause", "what happened", "request", "from")
        for failure in failures[:FAILURES]:
            table.add_row(
                f"{duration(failure.seconds_ago)} ago",
                Text(failure.cause, "red"),
                Text(failure.text),
                _name(failure.request_id),
                _name(failure.peer),
            )
        parts.append(table)
    return Group(*parts)


def _transfers(answers: Sequence[Answer]) -> Iterator[tuple[RenderableType, ...]]:
    for answer in answers:
        for each in answer.report.transfers:
            known = bool(each.wanted_bytes)
            yield (
                _name(each.request_id or "a share"),
                _name(each.peer),
                Text(each.state, "red" if each.state == "draining" else "cyan"),
                ProgressBar(total=max(1, each.wanted_bytes), completed=each.bytes, width=24),
                f"{amount(each.bytes)} of {amount(each.wanted_bytes)}" if known else "–",
                duration(each.seconds),
            )


def _peers(peers: Sequence[PeerRow]) -> Table:
    table = _table("engine", "address", "transport")
    table.add_column("first transfer", justify="right")
    table.add_column("ranks", justify="right")
    for peer in peers:
        rates = [rank.bytes_per_second for rank in peer.ranks if rank.bytes_per_second > 0]
        name = f"{peer.transport}, not as expected" if peer.unexpected else peer.transport
        table.add_row(
            _name(peer.engine_id),
            Text(peer.address),
            Text(name, "red" if peer.unexpected else "green"),
            f"{amount(min(rates))}/s" if rates else "–",
            str(len(peer.ranks)),
        )
    return table


def _name(text: str) -> Text:
    """In one line; the end goes when there is no room."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _rank(report: Report) -> str:
    """Ranks are counted from 0, and 0 leads."""
    if report.rank is None or report.world_size is None:
        return "–"
    if report.rank:
        return f"{report.rank}, follower"
    return "0, alone" if report.world_size == 1 else f"0, leads {report.world_size}"


def _state(report: Report) -> Text:
    return Text("ready", "green") if report.ready else Text(report.not_ready, "yellow")


def _titled(title: str, count: int, room: int) -> Text:
    more = f"{room} of {count}" if count > room else str(count)
    return Text.assemble("\n", (title, "bold"), f"  {more}")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _spark(values: Sequence[int]) -> str:
    recent = values[-SPARK_STEPS:]
    most = max(recent, default=0)
    if not most:
        return "–"
    return "".join(_SPARKS[-(-value * (len(_SPARKS) - 1) // most)] for value in recent)

"""Reports as tables for a terminal. Text is never taken for markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvagent.top.ask import Answer, Lost, PeerRow, Report

__all__ = ["amount", "duration", "overview", "screen"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_SPARKS = " ▁▂▃▄▅▆▇█"
SPARK_STEPS = 24
FAILURES = 8
GAP = 2
"""Blanks between columns."""
_LEAST = {
    "sidecar": 21,  # an IPv4 address and a port
    "engine": 6,
    "rank": 11,
    "state": 12,
    "reading": 10,
    "last 2 min": SPARK_STEPS,
    "fetches": 9,
    "leases": 6,
    "blocks used": 11,
    "failed": 6,
    "up": 7,
}
"""The overview's columns, and how narrow each may become."""
_WORDS = {"sidecar": 80, "engine": 40, "rank": 11, "state": 80}
"""Those that hold words, and how wide each may become where there is room."""
_DROPPED = (
    *("last 2 min", "blocks used", "leases", "fetches", "up", "rank", "engine", "failed"),
    "reading",
)
"""In this order, where there is none."""


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


def overview(answers: Sequence[Answer | Lost], width: int) -> Table:
    """One row for each sidecar. What does not fit into `width` columns is left out, the least
    important first; addresses and states stay."""
    rows = [_row(answer) for answer in answers]
    widths = _widths(rows, width)
    table = _table()
    for title in [each for each in _LEAST if each in widths]:
        number = title not in _WORDS
        table.add_column(
            title,
            width=widths[title],
            overflow="fold",
            no_wrap=number,
            justify="right" if number else "left",
        )
    for row in rows:
        table.add_row(*(row.get(title, Text()) for title in widths))
    return table


def _row(answer: Answer | Lost) -> dict[str, Text]:
    """Cells by title."""
    if isinstance(answer, Lost):
        return {"sidecar": Text(answer.address), "state": Text(f"lost: {answer.why}", "red")}
    report = answer.report
    follower = report.role == "follower"
    blocks = sum(report.ledger.values())
    used = blocks - report.ledger.get("free", 0)
    leases = report.leases.get("offered", 0) + report.leases.get("claimed", 0)
    failed = sum(report.throughput.fetches_failed)
    own = sum(report.fetches.values())
    return {
        "sidecar": Text(answer.address),
        "engine": _name(report.engine_id or "–"),
        "rank": Text(_rank(report)),
        "state": _state(report),
        "reading": Text(f"{amount(report.throughput.rate)}/s"),
        "last 2 min": Text(_spark(report.throughput.read_bytes), "cyan"),
        "fetches": Text(f"{report.parts_reading} shares" if follower else str(own)),
        "leases": Text("–" if follower else str(leases)),
        "blocks used": Text(f"{100 * used / blocks:.0f} %" if blocks else "–"),
        "failed": Text("–") if follower else Text(str(failed), "red" if failed else ""),
        "up": Text(duration(report.uptime_seconds)),
    }


def _widths(rows: Sequence[dict[str, Text]], width: int) -> dict[str, int]:
    """Of the columns that fit, in their order. A terminal's table would rather fold the words."""
    full = {
        title: max([len(title), *(row[title].cell_len for row in rows if title in row)])
        for title in _LEAST
    }
    widths = {
        title: min(least, full[title]) if title in _WORDS else max(least, full[title])
        for title, least in _LEAST.items()
    }
    dropped = iter(_DROPPED)
    while (spare := width - sum(widths.values()) - GAP * (len(widths) - 1)) < 0:
        title = next(dropped, "")
        if not title:
            break
        del widths[title]
    for title, most in _WORDS.items():
        if title in widths and spare > 0:
            more = min(spare, max(0, min(most, full[title]) - widths[title]))
            widths[title] += more
            spare -= more
    return widths


def screen(answers: Sequence[Answer | Lost], console: Console) -> Group:
    """The overview, transfers with bars, peers and the newest failures; about the console's
    height."""
    found = [answer for answer in answers if isinstance(answer, Answer)]
    table = overview(answers, console.width)
    parts: list[RenderableType] = [table]
    room = max(3, (console.height - len(console.render_lines(table)) - 11) // 2)
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
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP, 0, 0))
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _spark(values: Sequence[int]) -> str:
    recent = values[-SPARK_STEPS:]
    most = max(recent, default=0)
    if not most:
        return "–"
    return "".join(_SPARKS[-(-value * (len(_SPARKS) - 1) // most)] for value in recent)

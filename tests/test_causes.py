"""What a failure says to people: ranks and addresses, not the fabric's names of its agents."""

from __future__ import annotations

from kvagent.agent.causes import ago, cause_text, of_ranks
from kvagent.core.regions import RankLayout
from kvagent.errors import FabricError, PeerGoneError
from kvagent.fabric.base import ReadCancelled
from kvagent.wire.messages import RankCard

HEX = "0123456789abcdef" * 2


def card(tp_rank: int, host: str = "10.0.0.7") -> RankCard:
    layout = RankLayout(
        tp_rank=tp_rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        ranges=(),
        groups=(),
        layers=(),
        families=(),
    )
    return RankCard(
        tp_rank=tp_rank, pp_rank=0, host=host, port=7100 + tp_rank, incarnation="i", layout=layout
    )


def test_agents_become_ranks() -> None:
    cards = [card(0), card(1, "::1")]
    told = of_ranks(PeerGoneError(f"pre.fill/0.1/{HEX}/serve is gone"), "pre.fill", cards)
    assert type(told) is PeerGoneError
    assert cause_text(told) == (
        "peer_gone: rank (tp 1, pp 0) of engine pre.fill at [::1]:7101 is gone"
    )
    other = FabricError(f"preXfill/0.1/{HEX}/serve is gone")
    assert str(of_ranks(other, "pre.fill", cards)) == str(other), "nobody's agent that is known"
    assert type(of_ranks(ReadCancelled("cancelled"), "pre.fill", cards)) is ReadCancelled


def test_a_single_rank_is_always_named() -> None:
    where = "rank (tp 0, pp 0) of engine e at 10.0.0.7:7100"
    assert str(of_ranks(FabricError("NIXL_ERR_X"), "e", [card(0)])) == f"{where}: NIXL_ERR_X"
    named = of_ranks(PeerGoneError(f"e/0.0/{HEX}/fetch is gone"), "e", [card(0)])
    assert str(of_ranks(named, "e", [card(0)])) == f"{where} is gone"


def test_when_a_peer_was_heard_of() -> None:
    assert ago(None) == "never answered"
    assert ago(2.34) == "answered 2.3 s ago"

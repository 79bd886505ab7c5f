"""The producer's lease table, event by event."""

from __future__ import annotations

import numpy as np
import pytest

from kvagent.core.lease import LeaseTable, Verdict, ticket_digest
from kvagent.core.ledger import BlockState, Ledger
from kvagent.core.regions import CacheGroup
from kvagent.errors import BlockInUseError

BLOCKS = (b"\x01\0\0\0\x02\0\0\0",)
DIGEST = ticket_digest(BLOCKS, 8)
TOKEN = b"t" * 16


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.know([CacheGroup(index=0, block_size=4, num_blocks=8)])
    return ledger


@pytest.fixture
def table(ledger: Ledger) -> LeaseTable:
    return LeaseTable(
        lease_seconds=10,
        ledger=ledger,
        park_seconds=2,
        tombstone_seconds=100,
        max_parked=3,
        max_tombstones=5,
    )


def offer(table: LeaseTable, now: float = 0.0, transfer: str = "t", request: str = "r") -> object:
    table.offer(now, transfer, TOKEN, request, BLOCKS, 8)
    return table.answer_parked(now, transfer)


def claim(table: LeaseTable, now: float, fetch: str = "f", transfer: str = "t") -> Verdict | None:
    return table.claim(now, transfer, TOKEN, fetch, DIGEST)


def complete(table: LeaseTable, now: float, fetch: str = "f", transfer: str = "t") -> Verdict:
    return table.complete(now, transfer, TOKEN, fetch, DIGEST)


def test_offer_claim_complete_gives_the_blocks_back_once(table: LeaseTable, ledger: Ledger) -> None:
    offer(table)
    assert ledger.counts()["offered"] == 2
    assert claim(table, 1) is Verdict.HELD
    assert ledger.counts()["claimed"] == 2
    assert table.take_finished() == set()
    assert complete(table, 2) is Verdict.HELD
    assert table.take_finished() == {"r"}
    assert table.take_finished() == set()
    assert ledger.counts()["free"] == 8


def test_second_deliveries_are_answered_as_the_first(table: LeaseTable) -> None:
    offer(table)
    assert offer(table) is None
    assert claim(table, 1) is claim(table, 1) is Verdict.HELD
    assert complete(table, 2) is Verdict.HELD
    assert complete(table, 3) is Verdict.HELD
    assert table.take_finished() == {"r"}
    assert offer(table, 4) is None, "a tombstone is not offered anew"
    assert table.counts()["offered"] == 0


def test_a_ticket_is_good_for_one_fetch(table: LeaseTable) -> None:
    offer(table)
    claim(table, 1)
    assert claim(table, 1, "other") is Verdict.USED
    assert complete(table, 2, "other") is Verdict.USED
    assert table.release(2, "t", TOKEN, "other") is Verdict.USED
    assert table.release(2, "t", TOKEN, "") is Verdict.USED, "released by a stranger to the fetch"
    assert complete(table, 3) is Verdict.HELD
    assert claim(table, 4, "other") is Verdict.USED


def test_a_lapsed_lease_is_never_good_again(table: LeaseTable) -> None:
    offer(table)
    claim(table, 1)
    # No sweep has run: the question itself finds that it lapsed.
    assert complete(table, 11) is Verdict.EXPIRED
    assert table.take_finished() == {"r"}
    assert table.renew(11, "t", "f") is Verdict.EXPIRED
    assert claim(table, 12) is Verdict.EXPIRED


def test_renewal_holds_it_beyond_the_first_lease(table: LeaseTable) -> None:
    offer(table)
    claim(table, 9)
    for now in range(12, 100, 7):
        assert table.renew(now, "t", "f") is Verdict.HELD
        table.sweep(now + 6)
    assert complete(table, 100) is Verdict.HELD


def test_sweep_is_full_not_in_insertion_order(table: LeaseTable) -> None:
    offer(table, 0, "a", "ra")
    offer(table, 0, "b", "rb")
    assert claim(table, 8, "f", "a") is Verdict.HELD
    table.sweep(11)
    assert table.take_finished() == {"rb"}


def test_unclaimed_offer_expires(table: LeaseTable) -> None:
    offer(table)
    table.sweep(10)
    assert table.take_finished() == {"r"}
    assert claim(table, 10.5) is Verdict.EXPIRED


def test_cancel_frees_at_once_and_the_reader_is_told(table: LeaseTable) -> None:
    offer(table)
    claim(table, 1)
    assert table.cancel(2, "r")
    assert table.take_finished() == {"r"}
    assert complete(table, 3) is Verdict.CANCELLED
    assert not table.cancel(3, "r")
    assert not table.cancel(3, "never seen")


def test_revoke_ends_all(table: LeaseTable) -> None:
    offer(table, 0, "a", "ra")
    offer(table, 0, "b", "rb")
    claim(table, 1, "f", "a")
    table.revoke_all(2)
    assert table.take_finished() == {"ra", "rb"}
    assert complete(table, 3, "f", "a") is Verdict.REVOKED


def test_wrong_token_and_wrong_blocks(table: LeaseTable) -> None:
    offer(table)
    assert table.claim(1, "t", b"x" * 16, "f", DIGEST) is Verdict.FORBIDDEN
    assert table.claim(1, "t", TOKEN, "f", b"x" * 32) is Verdict.MISMATCH
    assert table.complete(1, "t", b"x" * 16, "f", DIGEST) is Verdict.FORBIDDEN
    assert table.release(1, "t", b"x" * 16, "f") is Verdict.FORBIDDEN
    assert claim(table, 2) is Verdict.HELD, "the impostors changed nothing"


def test_claim_that_overtakes_its_offer_is_parked(table: LeaseTable) -> None:
    assert claim(table, 0) is None
    assert claim(table, 0.5) is None, "asked again, still parked"
    assert offer(table, 1) == ("f", Verdict.HELD)
    assert complete(table, 2) is Verdict.HELD


def test_parked_claims_run_out_and_are_bounded(table: LeaseTable) -> None:
    for i in range(3):
        assert claim(table, 0, f"f{i}", f"t{i}") is None
    assert claim(table, 0, "f9", "t9") is Verdict.UNKNOWN
    assert claim(table, 0, "rival", "t0") is Verdict.UNKNOWN
    assert sorted(table.sweep(2)) == ["f0", "f1", "f2"]
    assert table.counts()["parked"] == 0


def test_release_of_a_parked_claim(table: LeaseTable) -> None:
    claim(table, 0)
    assert table.release(0.1, "t", TOKEN, "f") is Verdict.UNKNOWN
    assert offer(table, 1) is None, "nobody waits any more"
    assert table.counts()["offered"] == 0, "the release is for this offer too"
    assert table.take_finished() == {"r"}


def test_a_release_that_overtakes_its_offer(table: LeaseTable) -> None:
    assert table.release(0, "a", TOKEN, "") is Verdict.UNKNOWN
    assert table.release(0, "b", b"x" * 16, "") is Verdict.UNKNOWN
    assert table.release(0, "c", TOKEN, "f") is Verdict.UNKNOWN
    assert table.release(0, "d", TOKEN, "") is Verdict.UNKNOWN, "too many are not remembered"
    for name in "abd":
        offer(table, 1, name, name)
    assert table.take_finished() == {"a"}
    assert claim(table, 1, "f", "a") is Verdict.RELEASED
    table.sweep(3)
    offer(table, 3, "c", "c")  # it came too late
    assert table.counts()["offered"] == 3


def test_release_unclaimed_and_claimed(table: LeaseTable) -> None:
    offer(table, 0, "a", "ra")
    offer(table, 0, "b", "rb")
    claim(table, 1, "f", "b")
    assert table.release(2, "a", TOKEN, "") is Verdict.RELEASED
    assert table.release(2, "b", TOKEN, "f") is Verdict.RELEASED
    assert table.release(3, "b", TOKEN, "f") is Verdict.RELEASED
    assert table.take_finished() == {"ra", "rb"}
    assert complete(table, 3, "f", "b") is Verdict.RELEASED


def test_tombstones_are_bounded_and_age(table: LeaseTable) -> None:
    for i in range(20):
        offer(table, 0, f"t{i}", f"r{i}")
        table.cancel(0, f"r{i}")
    assert table.counts()["tombstones"] == 5
    table.sweep(101)
    assert table.counts()["tombstones"] == 0
    assert claim(table, 102, "f", "t19") is None, "forgotten: it may be an offer to come"


def test_request_with_two_offers_is_finished_when_both_are(table: LeaseTable) -> None:
    offer(table, 0, "a")
    offer(table, 0, "b")
    table.release(1, "a", TOKEN, "")
    assert table.take_finished() == set()
    table.release(1, "b", TOKEN, "")
    assert table.take_finished() == {"r"}


def test_request_offered_again_is_not_finished(table: LeaseTable) -> None:
    """The first lease ran out, and a late claim noticed before anybody asked what is finished."""
    offer(table, 0, "a")
    assert claim(table, 11, "f", "a") is Verdict.EXPIRED
    offer(table, 11, "b")
    assert table.take_finished() == set(), "its blocks are lent"
    table.release(12, "b", TOKEN, "")
    assert table.take_finished() == {"r"}


def test_blocks_that_are_written_are_not_lent(table: LeaseTable, ledger: Ledger) -> None:
    fetch = ledger.reserve({0: np.array([2], np.int32)})
    assert claim(table, 0) is None, "it waits for the offer"
    with pytest.raises(BlockInUseError, match="block 2 of group 0 is reserved"):
        table.offer(1, "t", TOKEN, "r", BLOCKS, 8)
    assert table.answer_parked(1, "t") == ("f", Verdict.REFUSED)
    assert complete(table, 1) is Verdict.REFUSED
    assert table.take_finished() == {"r"}, "its engine must not wait for it"
    fetch.move(BlockState.FREE)
    assert offer(table, 2, "t2") is None
    assert ledger.counts()["offered"] == 2


def test_quiesced_it_starts_nothing_and_ends_what_runs(table: LeaseTable) -> None:
    offer(table, 0, "a", "ra")
    offer(table, 0, "b", "rb")
    claim(table, 1, "f", "a")
    table.quiesced = True
    assert claim(table, 2, "g", "b") is Verdict.QUIESCED
    assert claim(table, 2, "f", "a") is Verdict.HELD, "asked again, as the first time"
    assert table.renew(3, "a", "f") is Verdict.HELD
    assert complete(table, 4, "f", "a") is Verdict.HELD
    table.quiesced = False
    assert claim(table, 5, "g", "b") is Verdict.QUIESCED, "it may have read meanwhile"
    assert table.claim(5, "b", TOKEN, "g", DIGEST, begun=False) is Verdict.HELD
    assert claim(table, 6, "g", "b") is Verdict.HELD, "asked again, when it reads"
    assert complete(table, 7, "g", "b") is Verdict.HELD


def test_a_short_fetch_only_completes(table: LeaseTable, ledger: Ledger) -> None:
    offer(table)
    assert complete(table, 9) is Verdict.HELD
    assert table.take_finished() == {"r"}
    assert table.ended == {"completed": 1}
    assert ledger.counts()["free"] == 8
    assert complete(table, 10) is Verdict.HELD, "asked again, as the first time"
    assert complete(table, 10, "other") is Verdict.USED
    assert claim(table, 10) is claim(table, 10, "other") is Verdict.USED
    assert table.take_finished() == set()


def test_a_short_fetch_is_refused_as_its_claim_would_be(table: LeaseTable) -> None:
    offer(table)
    assert table.complete(1, "t", b"x" * 16, "f", DIGEST) is Verdict.FORBIDDEN
    assert table.complete(1, "t", TOKEN, "f", b"x" * 32) is Verdict.MISMATCH
    table.quiesced = True
    assert complete(table, 1) is Verdict.QUIESCED
    table.quiesced = False
    assert table.counts()["offered"] == 1, "nothing has changed"
    assert complete(table, 2) is Verdict.QUIESCED, "what was read may be of that time"
    assert complete(table, 2, "another") is Verdict.QUIESCED
    assert table.claim(3, "t", TOKEN, "f", DIGEST, begun=False) is Verdict.HELD
    assert complete(table, 9.9) is Verdict.HELD


def test_who_was_known_to_read_was_waited_for(table: LeaseTable) -> None:
    offer(table)
    assert claim(table, 1) is Verdict.HELD
    table.quiesced = True
    table.quiesced = False
    assert complete(table, 2) is Verdict.HELD


def test_what_is_offered_after_it_was_quiesced_is_as_ever(table: LeaseTable) -> None:
    table.quiesced = True
    offer(table, 0, "a", "ra")
    table.quiesced = False
    offer(table, 0, "b", "rb")
    assert complete(table, 1, "f", "a") is Verdict.QUIESCED
    assert complete(table, 1, "g", "b") is Verdict.HELD


def test_a_held_ticket_that_was_altered(table: LeaseTable) -> None:
    """Its fetch does not claim again: its blocks are compared when it is completed."""
    offer(table)
    assert table.claim(0, "t", TOKEN, "f", DIGEST, reading=False, begun=False) is Verdict.HELD
    assert table.complete(1, "t", TOKEN, "f", b"x" * 32) is Verdict.MISMATCH
    assert complete(table, 2) is Verdict.HELD


def test_a_short_fetch_comes_too_late(table: LeaseTable) -> None:
    offer(table)
    assert complete(table, 10) is Verdict.EXPIRED, "no sweep has run"
    assert table.take_finished() == {"r"}
    offer(table, 10, "u", "s")
    table.cancel(11, "s")
    assert complete(table, 11, "f", "u") is Verdict.CANCELLED
    offer(table, 12, "v", "s")
    assert table.release(13, "v", TOKEN, "f") is Verdict.RELEASED
    assert complete(table, 13, "f", "v") is Verdict.RELEASED


def test_a_rival_of_a_short_fetch(table: LeaseTable) -> None:
    offer(table)
    assert claim(table, 1, "rival") is Verdict.HELD
    assert complete(table, 2) is Verdict.USED
    assert complete(table, 3, "rival") is Verdict.HELD


def test_a_complete_that_overtakes_its_offer_is_not_remembered(table: LeaseTable) -> None:
    """Its claim waits for the offer instead, and then it is asked again."""
    assert complete(table, 0) is Verdict.UNKNOWN
    assert table.counts()["parked"] == 0
    assert claim(table, 0) is None
    assert complete(table, 0.5) is Verdict.UNKNOWN
    assert offer(table, 1) == ("f", Verdict.HELD)
    assert complete(table, 1.5) is Verdict.HELD


def test_what_was_held_is_completed_without_another_claim(table: LeaseTable) -> None:
    """A fetch of a held ticket is short, too; held alone it is not read, and quiesced ends it."""
    for transfer in "ab":
        offer(table, 0, transfer, f"r{transfer}")
        verdict = table.claim(0, transfer, TOKEN, "f", DIGEST, reading=False)
        assert verdict is Verdict.HELD
    assert complete(table, 1, "f", "a") is Verdict.HELD
    table.quiesced = True
    assert complete(table, 2, "f", "b") is Verdict.QUIESCED
    assert table.counts()["claimed"] == 1
    table.quiesced = False
    assert complete(table, 3, "f", "b") is Verdict.QUIESCED
    assert table.claim(4, "b", TOKEN, "f", DIGEST, begun=False) is Verdict.HELD
    assert complete(table, 5, "f", "b") is Verdict.HELD


def test_an_engine_that_is_gone_holds_nothing(table: LeaseTable) -> None:
    for transfer, consumer in (("a", "gone"), ("b", "there"), ("c", "")):
        offer(table, 0, transfer, f"r{transfer}")
        if consumer:
            table.claim(1, transfer, TOKEN, f"f{transfer}", DIGEST, consumer)
    table.drop_consumer(2, "gone")
    assert table.take_finished() == {"ra"}
    assert complete(table, 3, "fa", "a") is Verdict.REVOKED
    assert complete(table, 3, "fb", "b") is Verdict.HELD
    assert table.counts()["offered"] == 1

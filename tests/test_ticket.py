"""Tickets survive JSON; whatever else comes in their place is a `TicketError` that says why."""

from __future__ import annotations

import copy
import json
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.client.ticket import make_ticket, read_ticket
from kvagent.errors import BlockRangeError, ProtocolError, TicketError
from kvagent.wire import local
from kvagent.wire.codec import MAX_BLOCKS, pack_blocks, unpack_blocks
from kvagent.wire.messages import PROTOCOL, Fetch, Ready

READY = Ready(
    engine_id="prefill",
    host="10.0.0.5",
    port=7100,
    tp_size=2,
    epoch="0123456789abcdef.3",
    lease_seconds=30.0,
)
TOKEN = bytes(range(16))


def ticket(**changes: Any) -> dict[str, Any]:
    """A good one; `kvagent__x` changes the inner key x."""
    made = make_ticket(READY, "request", "transfer", TOKEN, [3, 5, 7], 40)
    for name, value in changes.items():
        place = made["kvagent"] if name.startswith("kvagent__") else made
        place[name.removeprefix("kvagent__")] = value
    return made


@given(
    st.one_of(
        st.lists(st.integers(0, 2**31 - 1), max_size=20),
        st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=4),
    ),
    st.integers(1, 2**30),
    st.binary(min_size=16, max_size=16),
)
def test_json_round_trip(block_ids: Any, num_tokens: int, token: bytes) -> None:
    made = make_ticket(READY, "request", "transfer", token, block_ids, num_tokens)
    back = json.loads(json.dumps(made))
    assert back == made
    parsed = read_ticket(back)
    assert (parsed.engine_id, parsed.host, parsed.port) == ("prefill", "10.0.0.5", 7100)
    assert (parsed.epoch, parsed.transfer_id) == (READY.epoch, "transfer")
    assert (parsed.token, parsed.num_tokens) == (token, num_tokens)
    assert parsed.blocks == pack_blocks(block_ids)


def test_the_names_that_routers_pass_through() -> None:
    assert ticket() == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill",
        "remote_request_id": "request",
        "remote_block_ids": [3, 5, 7],
        "remote_host": "10.0.0.5",
        "remote_port": 7100,
        "tp_size": 2,
        "kvagent": {
            "transfer_id": "transfer",
            "token": TOKEN.hex(),
            "num_tokens": 40,
            "epoch": "0123456789abcdef.3",
            "protocol": PROTOCOL,
            "lease_seconds": 30.0,
        },
    }


def test_a_ticket_is_its_own() -> None:
    """The engine goes on changing its block table, which need not be a list either."""
    ids = [3, 5, 7]
    made = make_ticket(READY, "request", "transfer", TOKEN, ids, 40)
    ids.clear()
    assert made == ticket()
    tables: list[Any] = [np.array([3, 5, 7]), (3, 5, 7), [np.int32(3), 5, 7], [[3, 5, 7]]]
    for table in tables:
        made = make_ticket(READY, "request", "transfer", TOKEN, table, 40)
        assert json.dumps(made) == json.dumps(ticket())


def test_what_others_add_is_no_harm() -> None:
    """Routers add keys of their own, and a mapping need not be a dict."""
    made = ticket(remote_dp_rank=0, kvagent__hint="x")
    assert read_ticket(MappingProxyType(made)) == read_ticket(ticket())


@pytest.mark.parametrize("value", [None, 7, "ticket", [], [1], {}, {"remote_block_ids": [1]}])
def test_no_ticket_at_all(value: Any) -> None:
    with pytest.raises(TicketError, match="no key 'kvagent'"):
        read_ticket(value)


MISSING = [
    "remote_engine_id",
    "remote_block_ids",
    "remote_host",
    "remote_port",
    *(f"kvagent__{name}" for name in ticket()["kvagent"]),
]


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_key_is_named(name: str) -> None:
    made = ticket()
    place = made["kvagent"] if name.startswith("kvagent__") else made
    del place[name.removeprefix("kvagent__")]
    with pytest.raises(TicketError, match=name.removeprefix("kvagent__")):
        read_ticket(made)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remote_engine_id": 7}, "remote_engine_id"),
        ({"remote_engine_id": ""}, "remote_engine_id"),
        ({"remote_engine_id": "x" * 600}, "remote_engine_id"),
        ({"remote_engine_id": "\ud800"}, "surrogates"),
        ({"remote_host": None}, "remote_host"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_host": "\ud800"}, "surrogates"),
        ({"remote_port": "7100"}, "remote_port"),
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_block_ids": "abc"}, "remote_block_ids"),
        ({"remote_block_ids": [1, "2"]}, "remote_block_ids"),
        ({"remote_block_ids": [1, 2.5]}, "remote_block_ids"),
        ({"remote_block_ids": [1, [2]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1], 2]}, "remote_block_ids"),
        ({"remote_block_ids": [[[1]]]}, "remote_block_ids"),
        ({"remote_block_ids": [-1]}, "remote_block_ids"),
        ({"remote_block_ids": [2**31]}, "remote_block_ids"),
        ({"remote_block_ids": [2**80]}, "remote_block_ids"),
        ({"kvagent": None}, "kvagent"),
        ({"kvagent": []}, "kvagent"),
        ({"kvagent__transfer_id": ""}, "transfer_id"),
        ({"kvagent__transfer_id": "x" * 65}, "transfer_id"),
        ({"kvagent__transfer_id": 7}, "transfer_id"),
        ({"kvagent__token": "00"}, "token"),
        ({"kvagent__token": "zz" * 16}, "token"),
        ({"kvagent__token": "00 " * 16}, "token"),
        ({"kvagent__token": "0" * 32 + "\n"}, "token"),
        ({"kvagent__token": 0}, "token"),
        ({"kvagent__num_tokens": 0}, "num_tokens"),
        ({"kvagent__num_tokens": -5}, "num_tokens"),
        ({"kvagent__num_tokens": 2**70}, "num_tokens"),
        ({"kvagent__num_tokens": 1.5}, "num_tokens"),
        ({"kvagent__epoch": None}, "epoch"),
        ({"kvagent__epoch": "\ud800"}, "surrogates"),
        ({"kvagent__lease_seconds": "30"}, "lease_seconds"),
        ({"kvagent__protocol": PROTOCOL + 1}, f"protocol {PROTOCOL + 1}, this is .*{PROTOCOL}"),
        ({"kvagent__protocol": "1"}, "protocol '1'"),
        ({"kvagent__protocol": None}, "protocol None"),
    ],
)
def test_malformed_says_what_is_wrong(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TicketError, match=said):
        read_ticket(ticket(**changes))


def test_another_protocol_is_said_first() -> None:
    """A newer kvagent may have changed every other key."""
    with pytest.raises(TicketError, match="protocol 2"):
        read_ticket({"kvagent": {"protocol": 2, "everything": "else"}})


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=10),
        st.text(st.characters(categories=("Cs",)), min_size=1, max_size=2),
        st.binary(max_size=4),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers()), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(
    st.lists(st.tuples(st.sampled_from([*ticket(), *MISSING]), anything), min_size=1, max_size=3)
)
def test_any_change_is_a_good_ticket_or_a_ticket_error(changes: list[tuple[str, Any]]) -> None:
    made = ticket()
    for name, value in changes:
        inner = made["kvagent"] if name.startswith("kvagent__") else made
        if isinstance(inner, dict):
            inner[name.removeprefix("kvagent__")] = value
    before = copy.deepcopy(made)
    try:
        parsed = read_ticket(made)
    except TicketError:
        return
    finally:
        assert repr(made) == repr(before)
    # What is accepted can be sent.
    message = Fetch(
        request_id="r",
        engine_id=parsed.engine_id,
        host=parsed.host,
        port=parsed.port,
        epoch=parsed.epoch,
        transfer_id=parsed.transfer_id,
        token=parsed.token,
        num_tokens=parsed.num_tokens,
        remote_blocks=parsed.blocks,
        local_blocks=(),
    )
    assert list(local.FrameReader().feed(local.frame(message))) == [message]


@given(anything)
def test_anything_is_a_ticket_error(value: Any) -> None:
    for candidate in (value, {"kvagent": value}, {**ticket(), "kvagent": value}):
        with pytest.raises(TicketError):
            read_ticket(candidate)


# ---------------------------------------------------------------- block ids

ids = st.lists(st.integers(0, 2**31 - 1), max_size=30)


@given(st.one_of(ids, st.lists(ids, min_size=1, max_size=4)))
def test_blocks_round_trip(block_ids: Any) -> None:
    nested = block_ids if block_ids and isinstance(block_ids[0], list) else [block_ids]
    packed = pack_blocks(block_ids)
    assert packed == tuple(b"".join(i.to_bytes(4, "little") for i in group) for group in nested)
    unpacked = unpack_blocks(packed)
    assert [group.tolist() for group in unpacked] == nested
    assert all(group.dtype == np.int32 for group in unpacked)


@given(ids)
def test_other_sequences_of_ints(block_ids: list[int]) -> None:
    packed = pack_blocks(block_ids)
    others: list[Any] = [
        tuple(block_ids),
        np.array(block_ids, np.int64),
        [np.int64(i) for i in block_ids],
    ]
    for other in others:
        assert pack_blocks(other) == packed
    assert pack_blocks(others) == packed * 3


def test_range() -> None:
    assert pack_blocks(range(3)) == pack_blocks([0, 1, 2])


@pytest.mark.parametrize(
    "block_ids",
    [
        None,
        7,
        "1",
        object(),
        {"a": 1},
        [1.5],
        [1.0],
        ["1"],
        [None],
        [object()],
        [-1],
        [2**31],
        [2**63],
        [2**80],
        [[1], [2.5]],
        [1, [2]],
        [[1], 2],
        [[[1]]],
        np.array([1.5]),
    ],
    ids=repr,
)
def test_not_block_ids(block_ids: Any) -> None:
    with pytest.raises(BlockRangeError, match="block id"):
        pack_blocks(block_ids)


@given(anything)
def test_any_value_is_block_ids_or_a_range_error(value: Any) -> None:
    try:
        packed = pack_blocks(value)
    except BlockRangeError:
        return
    assert unpack_blocks(packed)


def test_too_many_blocks() -> None:
    with pytest.raises(BlockRangeError, match="cap"):
        pack_blocks(range(MAX_BLOCKS + 1))


@given(st.lists(st.binary(max_size=20), max_size=3))
def test_unpacking_takes_whole_ids_only(packed: list[bytes]) -> None:
    if all(len(group) % 4 == 0 for group in packed):
        assert sum(map(len, unpack_blocks(packed))) == sum(map(len, packed)) // 4
    else:
        with pytest.raises(ProtocolError, match="not whole"):
            unpack_blocks(packed)

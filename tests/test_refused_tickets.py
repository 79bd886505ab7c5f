"""Tickets that are no good: each fails with its own reason, and none brings wrong bytes.

Real NIXL between two sidecar processes. What is read before the verdict is known may have
landed in the consumer's blocks; what matters is that it is never called good.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvagent.errors import TicketError
from tests.harness import Engine, Sidecar, random_fill, start

LEASE = 4.0


@pytest.fixture(scope="module")
def sidecars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Sidecar]]:
    folder = tmp_path_factory.mktemp("refused")
    config = folder / "kvagent.toml"
    config.write_text(f"lease_seconds = {LEASE}\n")
    made = start(folder, ["prefill", "decode"], "--config", str(config))
    yield made
    for sidecar in made:
        sidecar.close()


@pytest.fixture(scope="module")
def pair(sidecars: list[Sidecar]) -> Iterator[tuple[Engine, Engine]]:
    with (
        Engine(sidecars[:1], "prefill", fill=random_fill(1)) as producer,
        Engine(sidecars[1:], "decode") as consumer,
    ):
        yield producer, consumer


LOCAL, REMOTE = [1, 2, 3], [7, 8, 9]


def refused(consumer: Engine, name: str, ticket: dict[str, Any], local: list[int]) -> str:
    consumer.client.fetch(name, ticket, local)
    reason = consumer.received(name)
    assert reason is not None, "called good"
    return reason.split(":")[0]


def test_stale_ticket(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    ticket = producer.client.offer("stale", REMOTE, 12)
    producer.sent("stale")  # nobody came: the lease ran out
    for cache in producer.caches[0].values():
        cache.fill_(-1.0)  # and the blocks are used again
    assert refused(consumer, "stale", ticket, LOCAL) == "expired"


def test_ticket_used_twice(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    ticket = producer.client.offer("twice", REMOTE, 12)
    consumer.client.fetch("first", ticket, LOCAL)
    assert consumer.received("first") is None
    assert refused(consumer, "second", ticket, LOCAL) == "used"


def test_ticket_used_twice_at_once(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    ticket = producer.client.offer("race", REMOTE, 12)
    consumer.client.fetch("one", ticket, LOCAL)
    consumer.client.fetch("two", ticket, [4, 5, 6])
    ends = {consumer.received("one")}
    for out in consumer.seen:
        if "two" in (out.finished_recving or ()):
            ends.add(out.failed_recving.get("two"))
    if len(ends) == 1:
        ends.add(consumer.received("two"))
    assert None in ends
    assert {(end or "good").split(":")[0] for end in ends} == {"good", "used"}


def with_inner(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda ticket: ticket["kvagent"].update(changes)


def with_outer(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda ticket: ticket.update(changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_inner(transfer_id="0" * 32), "unknown"),
        (with_inner(token="0" * 32), "forbidden"),
        (with_outer(remote_block_ids=[7, 8, 10]), "mismatch"),
        (with_inner(num_tokens=11), "mismatch"),
        (with_outer(remote_engine_id="somebody"), "handshake"),
        (with_inner(epoch="past.1"), "peer_restarted"),
        (with_outer(remote_port=1), "peer_gone"),
    ],
    ids=["unknown", "token", "blocks", "tokens", "engine", "epoch", "port"],
)
def test_altered_ticket(
    request: pytest.FixtureRequest,
    pair: tuple[Engine, Engine],
    change: Callable[[dict[str, Any]], None],
    reason: str,
) -> None:
    producer, consumer = pair
    name = request.node.callspec.id
    good = producer.client.offer(name, REMOTE, 12)
    bad = copy.deepcopy(good)
    change(bad)
    assert refused(consumer, name, bad, LOCAL) == reason
    # Who has the token may give the transfer up, and does when it cannot be read.
    if reason in ("unknown", "forbidden", "mismatch"):
        consumer.client.fetch(f"{name}-good", good, LOCAL)
        assert consumer.received(f"{name}-good") is None, "the impostor spoilt the real one"


def test_block_ids_out_of_range(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    ticket = producer.client.offer("local", REMOTE, 12)
    assert refused(consumer, "local", ticket, [1, 2, 32]) == "block_range"
    ticket = producer.client.offer("short", REMOTE, 12)
    assert refused(consumer, "short", ticket, [1, 2]) == "block_range"
    # The producer's own engine offers blocks that it does not have.
    ticket = producer.client.offer("remote", [7, 8, 10**6], 12)
    assert refused(consumer, "remote", ticket, LOCAL) == "block_range"


def test_more_tokens_than_blocks(pair: tuple[Engine, Engine]) -> None:
    producer, consumer = pair
    ticket = producer.client.offer("tokens", REMOTE, 13)
    assert refused(consumer, "tokens", ticket, [1, 2, 3, 4]) == "block_range"


def test_not_a_ticket(pair: tuple[Engine, Engine]) -> None:
    _, consumer = pair
    with pytest.raises(TicketError, match="no key 'kvagent'"):
        consumer.client.fetch("x", {"do_remote_prefill": True, "remote_block_ids": [1]}, LOCAL)

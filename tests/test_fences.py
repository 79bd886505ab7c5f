"""What a fetch read may be wrong although its lease was never lost: then it is not good."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import torch

from kvagent.wire import local
from kvagent.wire.messages import Attach, Complete, Failed, Ready
from tests.harness import Engine
from tests.loopback import LONG
from tests.test_agent_loopback import LOCAL, at_rest, changed, good, offer, same, sidecar, wait_for
from tests.test_agent_loopback import engines as engines
from tests.test_agent_loopback import stage as stage

Engines = Callable[..., Engine]


class Scratched:
    """The producer's cache with other bytes, until `restore`."""

    def __init__(self, producer: Engine) -> None:
        self._tensors: list[torch.Tensor] = list(producer.caches[0].values())
        self._saved = [tensor.clone() for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.fill_(-1.0)

    def restore(self) -> None:
        for tensor, saved in zip(self._tensors, self._saved, strict=True):
            tensor.copy_(saved)


def claimed(producer: Engine) -> bool:
    return sidecar(producer).agent.leader.leases.counts()["claimed"] == 1


def test_a_held_ticket_that_was_altered_before_its_fetch(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    ticket = offer(producer, "r")
    consumer.client.hold(ticket)
    wait_for(lambda: claimed(producer), "not held")
    consumer.client.fetch("r", changed(ticket, remote_block_ids=[9, 8, 7]), LOCAL)
    assert str(consumer.received("r", LONG)).startswith("mismatch:")


def test_a_held_ticket_whose_fetch_does_not_know_that_it_is_deferred(engines: Engines) -> None:
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    client, kept = producer.client, []  # type: ignore[var-annotated]
    client._ready = msgspec.structs.replace(client._require_ready(), deferred=True)
    send, client._send = client._send, kept.append  # type: ignore[method-assign, assignment]
    ticket = offer(producer, "r")
    client._send = send  # type: ignore[method-assign]
    consumer.client.hold(ticket)
    leases = sidecar(producer).agent.leader.leases
    wait_for(lambda: leases.counts()["parked"] == 1, "not parked")
    scratched = Scratched(producer)
    with sidecar(producer).holding(Complete) as reached:
        consumer.client.fetch("r", changed(ticket, deferred=False), LOCAL)
        assert reached()
        scratched.restore()
        send(kept.pop())
        wait_for(lambda: claimed(producer), "not held")
    assert str(consumer.received("r", LONG)).startswith("mismatch:")


def test_what_was_read_while_the_producer_was_quiesced(engines: Engines) -> None:
    """It is not good after `resume` either; but its ticket is, and is claimed first from then."""
    producer, consumer = engines("prefill"), engines("decode")
    good(producer, consumer, "first")
    ticket = offer(producer, "r")
    fabric = sidecar(producer).fabric
    reads = fabric.reads
    sidecar(producer).hang()
    consumer.client.fetch("r", ticket, LOCAL)
    wait_for(lambda: fabric.reads > reads, "not reading")
    assert producer.client.quiesce(LONG) == ()
    scratched = Scratched(producer)
    with sidecar(producer).holding(Complete) as reached:
        sidecar(producer).resume()
        assert reached()
        scratched.restore()
        producer.client.resume()
        wait_for(lambda: not sidecar(producer).agent.leader.quiesced, "not resumed")
    assert str(consumer.received("r", LONG)).startswith("quiesced:")
    with sidecar(producer).hearing() as heard:
        consumer.client.fetch("r", ticket, LOCAL)
        assert consumer.received("r", LONG) is None
    assert [type(message).__name__ for message in heard] == ["Claim", "Complete"]
    assert same(producer, consumer)
    producer.sent("r", LONG)
    at_rest(producer, consumer)


def test_a_scheduler_that_comes_in_the_moment_the_one_before_it_goes(engines: Engines) -> None:
    """Both are seen in one turn of the event loop."""
    producer = engines("prefill")
    there = sidecar(producer)
    busy = threading.Thread(target=lambda: there.stage.call(lambda: time.sleep(0.5)))
    with there.socket as scheduler:
        scheduler.settimeout(LONG)
        there.stage.call(lambda: None)  # accepted
        busy.start()
        time.sleep(0.1)
        producer.client.close()
        scheduler.sendall(local.frame(Attach()))
        busy.join()
        reader, heard = local.FrameReader(), []  # type: ignore[var-annotated]
        while not any(isinstance(message, Ready) for message in heard):
            heard += reader.feed(scheduler.recv(65536))
            assert not any(isinstance(message, Failed) for message in heard), heard

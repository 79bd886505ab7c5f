"""Keys: their files, and who can talk with whom over real ZMQ sockets."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from kvagent import EmbeddedAgent, ModelInfo, WorkerInfo
from kvagent.errors import ConfigError, PeerGoneError
from kvagent.fabric.loopback import LoopbackFabric, LoopbackNetwork
from kvagent.wire import control as control_module
from kvagent.wire import dial
from kvagent.wire.control import Control
from kvagent.wire.keys import KeyRing, fingerprint, fresh_ring, load_ring, make_keys
from kvagent.wire.messages import Drop, Peer, Renewed
from kvagent.wire.peer import PeerClient, PeerServer
from tests.test_embedded import SHAPE, SPEC, received

LONG = 40.0
"""A bound against hangs, never reached."""
MARK = "plaintext-in-transit"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, LONG))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes are noticed soon, and a round of keys is tried again soon."""
    monkeypatch.setattr(control_module, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(dial, "PAUSE", 0.1)


class Host:
    """A folder of keys."""

    def __init__(self, root: Path, name: str) -> None:
        self.folder = root / name
        make_keys(str(self.folder), name)

    def ring(self) -> KeyRing:
        return load_ring(str(self.folder))

    @property
    def public(self) -> bytes:
        return self.ring().own.public

    def allow(self, other: Host) -> None:
        """Its key, as it is now."""
        (name,) = [n for k, n in other.ring().allowed.items() if k == other.public]
        shutil.copy(other.folder / "allowed" / f"{name}.key", self.folder / "allowed")

    def forbid(self, public: bytes) -> None:
        (self.folder / "allowed" / f"{self.ring().allowed[public]}.key").unlink()

    def switch(self, other: Host) -> None:
        """To the pair of `other`, as the README says: the file is replaced at once."""
        copy = self.folder / "next"
        shutil.copy2(other.folder / "own.key_secret", copy)
        copy.replace(self.folder / "own.key_secret")


class Hosts:
    def __init__(self, root: Path) -> None:
        self._root = root

    def __call__(self, *names: str) -> list[Host]:
        return [Host(self._root, name) for name in names]

    def friends(self, *names: str) -> list[Host]:
        """A pair each, and every public key at each."""
        made = self(*names)
        for one, other in itertools.permutations(made, 2):
            one.allow(other)
        return made


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return Hosts(tmp_path)


async def echo(message: Peer) -> Peer:
    assert isinstance(message, Drop)
    return Renewed(verdicts=(message.engine_id,))


async def nobody(message: Peer) -> Peer:
    raise AssertionError("a stranger got in")


@asynccontextmanager
async def sidecar(host: Host | None) -> AsyncIterator[Control]:
    control = Control(keys=str(host.folder) if host else "")
    control.start()
    try:
        yield control
    finally:
        await control.close()


@asynccontextmanager
async def serving(host: Host | None, handler: Any = echo) -> AsyncIterator[tuple[PeerServer, int]]:
    async with sidecar(host) as control:
        server = PeerServer(control, handler)
        port = server.bind("127.0.0.1", 0)
        server.start()
        try:
            yield server, port
        finally:
            await server.close()


@asynccontextmanager
async def calling(host: Host | None, port: int) -> AsyncIterator[PeerClient]:
    async with sidecar(host) as control:
        client = PeerClient(control, "127.0.0.1", port)
        try:
            yield client
        finally:
            await client.close()


async def check(client: PeerClient, text: str = "x", timeout: float = LONG) -> None:
    answer = await client.call(Drop(engine_id=text), timeout, again=0.1)
    assert answer == Renewed(verdicts=(text,))


async def refused(client: PeerClient, match: str) -> None:
    """It is dialled in vain, and a call says why."""
    dialer = client._dialer
    assert dialer is not None
    await until(lambda: dialer.trouble)
    with pytest.raises(PeerGoneError, match=match):
        await check(client, "refused", timeout=0.5)


async def until(done: Callable[[], object]) -> None:
    while not done():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


# ---------------------------------------------------------------- files


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0, 0o077])
def test_what_is_made(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        own, allowed = make_keys(str(tmp_path / "a/b"), "node-1.example")
    finally:
        os.umask(old)
    assert own == tmp_path / "a/b/own.key_secret"
    assert mode(own) == 0o600
    assert mode(own.parent) & 0o077 == 0
    ring = load_ring(str(own.parent))
    assert allowed.name == f"node-1.example-{fingerprint(ring.own.public)}.key"
    assert ring.allowed == {ring.own.public: allowed.stem}
    assert ring.own.secret not in allowed.read_bytes()
    assert ring.own.secret in own.read_bytes()
    assert ring.own.secret.decode() not in repr(ring)
    assert zmq.curve_public(ring.own.secret) == ring.own.public


def test_a_pair_is_never_replaced(tmp_path: Path) -> None:
    own, _ = make_keys(str(tmp_path))
    before = own.read_bytes()
    with pytest.raises(ConfigError, match=r"own\.key_secret exists and is not replaced"):
        make_keys(str(tmp_path))
    assert own.read_bytes() == before
    assert len([*own.parent.rglob("*.key")]) == 1


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a b", "é", "x" * 65])
def test_names_that_are_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        make_keys(str(tmp_path / "keys"), name)
    assert not (tmp_path / "keys").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write"):
        make_keys(str(tmp_path / "file" / "keys"))


OTHER_SECRET = zmq.curve_keypair()[1].decode()


def spoil(path: Path, how: str) -> None:
    text = path.read_text()
    if how == "empty":
        text = ""
    elif how == "cut":
        text = text[: text.index("public-key") + 20]
    elif how == "no key":
        text = text.replace("public-key", "public-kez")
    elif how == "not z85":
        start = text.index('public-key = "') + 14
        text = text[:start] + "~" * 40 + text[start + 40 :]
    elif how == "another secret":
        text = text[: text.index("secret-key")] + f'secret-key = "{OTHER_SECRET}"\n'
    elif how == "no secret":
        text = text[: text.index("secret-key")]
    elif how == "long":
        text += "#" * 5000
    elif how == "bytes":
        path.write_bytes(b"\xff\x00" * 50)
        return
    path.write_text(text)


@pytest.mark.parametrize(
    "how",
    ["empty", "cut", "no key", "not z85", "another secret", "no secret", "long", "bytes"],
)
def test_a_pair_that_is_none(tmp_path: Path, how: str) -> None:
    own, _ = make_keys(str(tmp_path))
    good = load_ring(str(tmp_path))
    spoil(own, how)
    with pytest.raises(ConfigError, match=r"keys: .*own\.key_secret"):
        load_ring(str(tmp_path))
    fresh = fresh_ring(str(tmp_path), good)
    assert (fresh.own, fresh.allowed) == (good.own, good.allowed)
    assert len(fresh.problems) == 1


@pytest.mark.parametrize("how", ["empty", "cut", "no key", "not z85", "long", "bytes"])
def test_an_allowed_key_that_is_none(hosts: Hosts, how: str) -> None:
    one, other = hosts.friends("one", "other")
    good = one.ring()
    (path,) = (one.folder / "allowed").glob("other-*.key")
    spoil(path, how)
    with pytest.raises(ConfigError, match=r"keys: .*other-.*\.key"):
        one.ring()
    fresh = fresh_ring(str(one.folder), good)
    assert fresh.allowed.keys() == {good.own.public}
    assert other.public not in fresh.allowed
    assert len(fresh.problems) == 1


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    own, _ = make_keys(str(tmp_path))
    for wide in (0o640, 0o604):
        own.chmod(wide)
        with pytest.raises(ConfigError, match="chmod 600"):
            load_ring(str(tmp_path))


def test_folders_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kvagent keys new"):
        load_ring(str(tmp_path / "none"))
    make_keys(str(tmp_path / "keys"))
    shutil.rmtree(tmp_path / "keys" / "allowed")
    with pytest.raises(ConfigError, match="allowed is no folder"):
        load_ring(str(tmp_path / "keys"))


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "my keys"

    def command() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kvagent", "keys", "new", str(folder), "--name", "node1"],
            capture_output=True,
            text=True,
            timeout=100,
        )

    made = command()
    ring = load_ring(str(folder))
    assert made.returncode == 0
    assert f"scp -rp '{folder}' HOST:'{folder}'" in made.stdout
    assert f"node1-{fingerprint(ring.own.public)}.key" in made.stdout
    assert ring.own.secret.decode() not in made.stdout
    again = command()
    assert (again.returncode, again.stdout) == (2, "")
    assert "is not replaced" in again.stderr
    assert load_ring(str(folder)) == ring


# ---------------------------------------------------------------- who can talk with whom


def test_one_pair_for_all(hosts: Hosts) -> None:
    (shared,) = hosts("shared")

    async def work() -> None:
        async with serving(shared) as (server, port), calling(shared, port) as client:
            await check(client)
            await asyncio.gather(*(check(client, str(i)) for i in range(50)))
            assert server.rejected == 0

    run(work())


def test_a_pair_each(hosts: Hosts) -> None:
    one, other = hosts.friends("one", "other")

    async def work() -> None:
        async with serving(one) as (_, port), calling(other, port) as client:
            await check(client)

    run(work())


def test_the_right_key_among_many(hosts: Hosts) -> None:
    server_host, caller, *others = hosts("server", "caller", *(f"host{i}" for i in range(20)))
    server_host.allow(caller)
    for host in (server_host, *others):  # the right one is the oldest
        caller.allow(host)

    async def work() -> None:
        async with serving(server_host) as (_, port), calling(caller, port) as client:
            address = f"tcp://127.0.0.1:{port}"
            assert client._control.server_keys(address)[-1] == server_host.public
            await check(client)
            # The next client to this address begins with the right one.
            known = client._control.server_keys(address)
            assert known[0] == server_host.public
            assert len(known) == 22

    run(work())


def test_a_stranger_is_told_and_never_heard(hosts: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    inside, stranger = hosts("inside", "stranger")
    stranger.allow(inside)

    async def work() -> None:
        async with serving(inside, nobody) as (server, port), calling(stranger, port) as client:
            mine = fingerprint(stranger.public)
            await refused(client, rf"refused the key .*\({mine}\)")
            await until(lambda: server._control.denied > 3)  # it tried again
            lines = [r.getMessage() for r in caplog.records if r.name == "kvagent.door"]
            assert len(lines) == 1, "and is complained about once"
            assert "from 127.0.0.1: " in lines[0]
            assert mine in lines[0]

    run(work())


def test_an_impostor_hears_nothing(hosts: Hosts) -> None:
    """A server whose key the caller does not allow, even if it lets everybody in."""
    caller, impostor = hosts("caller", "impostor")
    impostor.allow(caller)

    async def work() -> None:
        async with serving(impostor, nobody) as (_, port), calling(caller, port) as client:
            await refused(client, "none of the allowed keys")

    run(work())


def test_a_server_that_refuses_us_is_not_taken_for_one_with_another_key(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the loop is. The keys before the server's are wrong ones."""
    caller, server, *others = hosts("caller", "server", "b", "c", "d")
    for host in (server, *others):
        caller.allow(host)
    find = dial.Dialer._event

    async def late(self: dial.Dialer) -> int:
        time.sleep(0.15)  # noqa: ASYNC251  # long enough for libzmq to try again by itself
        return await find(self)

    monkeypatch.setattr(dial.Dialer, "_event", late)
    troubles: list[str] = []

    async def work() -> None:
        async with serving(server, nobody) as (_, port), calling(caller, port) as client:
            dialer = client._dialer
            assert dialer is not None
            known = dialer._control._known
            while not known:
                troubles.append(dialer.trouble)
                await asyncio.sleep(0.01)
            assert list(known.values()) == [server.public]
            await refused(
                client, f"it refused the key of this sidecar .{fingerprint(caller.public)}"
            )

    run(work())
    assert not any(troubles), "not all keys had been tried"


@pytest.mark.parametrize("at_server", [True, False])
def test_keys_on_one_side_only(hosts: Hosts, at_server: bool) -> None:
    (keys,) = hosts("keys")

    async def work() -> None:
        server_keys, client_keys = (keys, None) if at_server else (None, keys)
        async with (
            serving(server_keys, nobody) as (_, port),
            calling(client_keys, port) as client,
        ):
            with pytest.raises(
                PeerGoneError, match="uses no keys" if client_keys else "do both have keys"
            ):
                await check(client, timeout=1)

    run(work())


def test_without_a_door_nobody_comes_in(hosts: Hosts) -> None:
    """A server that is not asked for keys must not let everybody in."""
    (shared,) = hosts("shared")

    async def work() -> None:
        control = Control(keys=str(shared.folder))
        server = PeerServer(control, nobody)
        port = server.bind("127.0.0.1", 0)
        server.start()
        async with calling(shared, port) as client:
            with pytest.raises(PeerGoneError):
                await check(client, timeout=1)
        await server.close()
        await control.close()

    run(work())


class Wiretap:
    """A TCP relay that keeps what passes."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.heard = bytearray()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pass(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                self.heard += data
                sink.write(data)
        except OSError:
            pass
        finally:
            sink.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server.close()


@pytest.mark.parametrize("keys", [True, False])
def test_what_a_wiretap_hears(hosts: Hosts, keys: bool) -> None:
    shared = hosts("shared")[0] if keys else None

    async def work() -> None:
        async with serving(shared) as (_, port):
            tap = Wiretap(port)
            async with calling(shared, await tap.start()) as client:
                await check(client, MARK)
            assert (MARK.encode() in tap.heard) is not keys
            await tap.close()

    run(work())


def test_embedded_agents(hosts: Hosts) -> None:
    shared, stranger = hosts("shared", "stranger")
    network = LoopbackNetwork()
    agents = [
        EmbeddedAgent(make_fabric=lambda name, _: LoopbackFabric(network, name), **settings)
        for settings in (
            {"keys": str(shared.folder)},
            {"keys": str(shared.folder)},
            {"keys": str(stranger.folder), "handshake_timeout": 0.5, "fetch_timeout": 20.0},
        )
    ]
    try:
        tensors = [torch.randn(SHAPE) for _ in agents]
        for number, (agent, tensor) in enumerate(zip(agents, tensors, strict=True)):
            model = ModelInfo(name="m", num_layers=1)
            agent.join(WorkerInfo(engine_id=f"engine{number}", model=model))
            agent.register_kv_caches({"l": tensor}, {"l": SPEC})
            agent.wait_ready(20)
        producer, consumer, outside = agents
        outside.fetch("r", producer.offer("r", [1, 2], 8), [1, 2])
        assert "none of the allowed keys" in (received(outside, "r") or "")
        consumer.fetch("s", producer.offer("s", [1, 2], 8), [3, 4])
        assert received(consumer, "s") is None
        assert torch.equal(tensors[1][3:5], tensors[0][1:3])
    finally:
        for agent in agents:
            agent.close()


# ---------------------------------------------------------------- rotation


def test_a_key_that_is_added_works_soon(hosts: Hosts) -> None:
    inside, newcomer = hosts("inside", "newcomer")
    newcomer.allow(inside)

    async def work() -> None:
        async with serving(inside) as (server, port), calling(newcomer, port) as client:
            call = asyncio.create_task(check(client))
            await until(lambda: server._control.denied)
            assert not call.done()
            inside.allow(newcomer)
            await call

    run(work())


def test_a_key_that_is_removed_ends_its_connections(hosts: Hosts) -> None:
    inside, stays, goes = hosts.friends("inside", "stays", "goes")
    heard: list[str] = []

    async def handler(message: Peer) -> Peer:
        assert isinstance(message, Drop)
        heard.append(message.engine_id)
        return await echo(message)

    async def work() -> None:
        async with (
            serving(inside, handler) as (server, port),
            calling(stays, port) as staying,
            calling(goes, port) as going,
        ):
            await asyncio.gather(check(staying), check(going))
            inside.forbid(goes.public)
            await until(lambda: server._control.denied)  # it dialled again
            await refused(going, "refused the key")
            await check(staying, "still here")
            assert "refused" not in heard
            inside.allow(goes)
            await check(going, "back")

    run(work())


def test_a_server_that_is_allowed_no_more_is_left(hosts: Hosts) -> None:
    server_host, caller = hosts.friends("server", "caller")

    async def work() -> None:
        async with serving(server_host) as (_, port), calling(caller, port) as client:
            await check(client)
            caller.forbid(server_host.public)
            await until(lambda: client._dialer is not None and client._dialer.trouble)
            await refused(client, "none of the allowed keys")

    run(work())


@pytest.mark.parametrize("who", ["server", "client", "both"])
def test_a_pair_is_replaced_while_calls_go_on(hosts: Hosts, who: str) -> None:
    """The shared pair, in the order that the README gives."""
    at_server, at_client, new = hosts("server", "client", "new")
    at_client.switch(at_server)  # the old shared pair
    at_client.allow(at_server)
    old = at_server.public

    async def work() -> None:
        async with serving(at_server) as (server, port), calling(at_client, port) as client:
            stop = asyncio.Event()
            calls = 0

            async def traffic() -> None:
                nonlocal calls
                while not stop.is_set():
                    await check(client, str(calls))
                    calls += 1

            async def more() -> None:
                target = calls + 20
                await until(lambda: calls >= target or going.done())

            going = asyncio.create_task(traffic())
            await more()
            for host in (at_server, at_client):
                host.allow(new)
            switched = [(at_server, server._control), (at_client, client._control)]
            for host, control in switched[who == "client" : 1 + (who != "server")]:
                await until(lambda c=control: new.public in c.ring.allowed)
                host.switch(new)
                await until(lambda c=control: c.own.public == new.public)
                await more()
            if who == "both":
                for host, control in switched:
                    host.forbid(old)
                    await until(lambda c=control: old not in c.ring.allowed)
                    await more()
                assert client._dialer is not None
                assert client._dialer._key == new.public
            stop.set()
            await going

    run(work())


def test_a_half_written_pair_changes_nothing(
    hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    (shared,) = hosts("shared")
    own = shared.folder / "own.key_secret"
    whole = own.read_text()

    async def work() -> None:
        async with serving(shared) as (server, port), calling(shared, port) as client:
            await check(client)
            own.write_text(whole[:-30])
            await until(lambda: server._control.ring.problems)
            await check(client)
            async with calling(None, port):
                pass
            own.write_text(whole)
            await until(lambda: not server._control.ring.problems)
            await check(client)
            complaints = [r for r in caplog.records if "own.key_secret" in r.getMessage()]
            assert len(complaints) == 2, "once at each side, however long it lasts"

    run(work())


# ---------------------------------------------------------------- strangers in numbers


def test_thousands_of_strangers_do_not_stop_a_friend(hosts: Hosts) -> None:
    """Some are silent, some speak HTTP, some CURVE with a key of their own."""
    inside, stranger = hosts("inside", "stranger")
    stranger.allow(inside)

    async def work() -> None:
        async with serving(inside) as (server, port), calling(inside, port) as friend:
            await check(friend)
            outside = zmq.Context()
            outside.set(zmq.MAX_SOCKETS, 2048)
            knockers = []
            for _ in range(200):
                knocker = outside.socket(zmq.DEALER)
                knocker.setsockopt(zmq.LINGER, 0)
                knocker.setsockopt(zmq.CURVE_PUBLICKEY, stranger.ring().own.public)
                knocker.setsockopt(zmq.CURVE_SECRETKEY, stranger.ring().own.secret)
                knocker.setsockopt(zmq.CURVE_SERVERKEY, inside.public)
                knocker.connect(f"tcp://127.0.0.1:{port}")
                knockers.append(knocker)
            raws = []
            openings = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f")
            for number in range(2000):
                raw = socket.create_connection(("127.0.0.1", port), LONG)
                raw.sendall(openings[number % 3])
                if number % 3:
                    raw.close()
                else:
                    raws.append(raw)
                if number % 100 == 0:
                    await check(friend, str(number))
            await until(lambda: server._control.denied >= 200)
            async with calling(inside, port) as another:
                await check(another)
            await check(friend)
            for raw in raws:
                raw.close()
            outside.destroy(linger=0)

    run(work())


def test_a_silent_connection_does_not_last(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that promises a handshake of 16 MB and sends it byte by byte."""
    monkeypatch.setattr(control_module, "HANDSHAKE_MS", 300)
    (inside,) = hosts("inside")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
    assert len(greeting) == 64
    huge = b"\x06" + (16 << 20).to_bytes(8, "big")

    async def work() -> None:
        async with serving(inside, nobody) as (_, port):
            for opening in (b"", greeting[:10], greeting, greeting + huge + b"x" * 1000):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(opening)
                try:
                    await reader.read()  # to the end, which comes by itself
                except ConnectionResetError:
                    pass
                writer.close()

    run(work())

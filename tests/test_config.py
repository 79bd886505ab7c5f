"""Settings: where they come from, and what is refused with which hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.config import Config, join_address, load, split_address
from kvagent.errors import ConfigError


def toml(folder: Path, text: str) -> str:
    path = folder / "kvagent.toml"
    path.write_text(text)
    return str(path)


def test_defaults_are_safe() -> None:
    config = load(None, {"socket": "/run/x.sock"})
    assert config.socket == "/run/x.sock"
    assert config.bind_address() == ("127.0.0.1", 0)
    assert config.advertised_host() == "127.0.0.1"
    assert config.http_address() is None
    assert not config.insecure


def test_flags_go_before_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'socket = "/file.sock"\nlease_seconds = 5\nbind = "127.0.0.1:7100"\n')
    config = load(path, {"socket": "/flag.sock", "bind": None, "insecure": None})
    assert config.socket == "/flag.sock"
    assert config.lease_seconds == 5.0
    assert config.bind == "127.0.0.1:7100"  # a flag that was not given


def test_every_setting_can_be_in_the_file(tmp_path: Path) -> None:
    given_values = {
        "socket": "/x.sock",
        "bind": "10.0.0.5:7100",
        "advertise": "node5.example",
        "http": "127.0.0.1:7101",
        "insecure": True,
        "lease_seconds": 3.5,
        "fetch_timeout": 1,
        "handshake_timeout": 2,
        "call_timeout": 3,
        "drain_timeout": 0,
        "fence_seconds": 0,
        "piece_bytes": 4096,
        "inflight_bytes": 8192,
        "staging_bytes": 0,
        "staging_run_bytes": 1,
        "log_level": "debug",
    }
    assert set(given_values) == set(Config.__struct_fields__), "a new setting: test it here"

    def text(value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')

    path = toml(tmp_path, "".join(f"{k} = {text(v)}\n" for k, v in given_values.items()))
    config = load(path, {})
    assert {name: getattr(config, name) for name in given_values} == given_values


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lease_second", "lease_seconds"), ("bnd", "bind"), ("fetch-timeout", "fetch_timeout")],
)
def test_unknown_setting_with_a_suggestion(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'; did you mean '{hint}'"):
        load(toml(tmp_path, f"{name} = 1\n"), {})


def test_unknown_setting_like_no_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'xyzzy'$"):
        load(toml(tmp_path, "xyzzy = 1\n"), {})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("lease_seconds = ", "is not TOML"),
        ("[bind]\nport = 1\n", "bind"),
        ('lease_seconds = "5"', "lease_seconds"),
        ("socket = 7", "socket"),
        ("insecure = 1", "insecure"),
        ("piece_bytes = 4096.5", "piece_bytes"),
        ('socket = "\xff', "is not TOML"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=problem):
        load(str(path), {})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*No such file"):
        load(str(tmp_path / "none.toml"), {})
    with pytest.raises(ConfigError, match="cannot read"):
        load(str(tmp_path), {})


# ---------------------------------------------------------------- addresses


@pytest.mark.parametrize("bind", ["0.0.0.0:7100", "[::]:7100", "*:7100"])
@pytest.mark.parametrize("advertise", ["", "0.0.0.0", "::"])
def test_listening_everywhere_needs_an_address_to_advertise(bind: str, advertise: str) -> None:
    with pytest.raises(ConfigError, match="--advertise HOST"):
        load(None, {"bind": bind, "advertise": advertise, "insecure": True})


@pytest.mark.parametrize("bind", ["10.0.0.5:7100", "0.0.0.0:7100", "[fd00::5]:7100", "node5:7100"])
def test_beyond_loopback_needs_insecure(bind: str) -> None:
    with pytest.raises(ConfigError, match="insecure = true"):
        load(None, {"bind": bind, "advertise": "10.0.0.5"})
    config = load(None, {"bind": bind, "advertise": "10.0.0.5", "insecure": True})
    assert config.advertised_host() == "10.0.0.5"


@pytest.mark.parametrize(
    ("bind", "advertise"),
    [
        ("127.0.0.1:0", "10.0.0.5"),
        ("[::1]:0", "fd00::5"),
        ("localhost:0", "node5"),
        ("10.0.0.5:0", "127.0.0.1"),
        ("10.0.0.5:0", "localhost"),
        ("0.0.0.0:0", "::1"),
        ("10.0.0.5:0", "0.0.0.0"),
    ],
)
def test_an_advertised_address_that_cannot_be_reached(bind: str, advertise: str) -> None:
    with pytest.raises(ConfigError, match=advertise):
        load(None, {"bind": bind, "advertise": advertise, "insecure": True})


@pytest.mark.parametrize("advertise", ["10.0.0.5:7100", "[fd00::5]", "a b", "http://x", "-x", "é"])
def test_advertise_is_a_host_alone(advertise: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        load(None, {"bind": "10.0.0.5:7100", "advertise": advertise, "insecure": True})


@pytest.mark.parametrize("advertise", ["10.0.0.5", "fd00::5", "node5", "a.b-c_d.example."])
def test_hosts_that_can_be_advertised(advertise: str) -> None:
    flags = {"bind": "10.0.0.5:7100", "advertise": advertise, "insecure": True}
    assert load(None, flags).advertised_host() == advertise


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:7100", ("127.0.0.1", 7100)),
        ("[::1]:7100", ("::1", 7100)),
        ("[fd00::1:2]:0", ("fd00::1:2", 0)),
        ("host.example:65535", ("host.example", 65535)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert split_address(text, "bind") == address
    assert join_address(*address) == text


@pytest.mark.parametrize("text", ["::1:7100", "fd00::1:7100", "[::1", "::1"])
def test_ipv6_needs_brackets(text: str) -> None:
    with pytest.raises(ConfigError, match=r"bind .*\[ADDRESS\]:PORT"):
        split_address(text, "bind")


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", ":80", "[]:80", "host:-1", "host:65536", "host:x", "host: 1"]
)
def test_not_an_address(text: str) -> None:
    with pytest.raises(ConfigError, match=r"http .* is not HOST:PORT"):
        split_address(text, "http")


@given(st.text(max_size=20))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        host, port = split_address(text, "bind")
    except ConfigError:
        return
    assert host
    assert 0 <= port <= 65535


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"lease_seconds": 0}, "lease_seconds"),
        ({"lease_seconds": 0.5}, "lease_seconds"),
        ({"lease_seconds": 86401}, "lease_seconds"),
        ({"lease_seconds": float("nan")}, "lease_seconds"),
        ({"fetch_timeout": 0}, "fetch_timeout"),
        ({"fetch_timeout": float("inf")}, "fetch_timeout"),
        ({"handshake_timeout": -1}, "handshake_timeout"),
        ({"call_timeout": 0}, "call_timeout"),
        ({"drain_timeout": -1}, "drain_timeout"),
        ({"fence_seconds": float("nan")}, "fence_seconds"),
        ({"piece_bytes": 4095}, "piece_bytes"),
        ({"piece_bytes": 8192, "inflight_bytes": 4096}, "inflight_bytes"),
        ({"staging_bytes": -1}, "staging_bytes"),
        ({"staging_run_bytes": 2**40 + 1}, "staging_run_bytes"),
        ({"log_level": "loud"}, "log_level"),
        ({"http": "8080"}, "http"),
        ({"bind": "nowhere"}, "bind"),
    ],
)
def test_bounds(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        load(None, changes)

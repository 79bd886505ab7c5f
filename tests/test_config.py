"""Settings: where they come from, and what is refused with which hint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvagent.config import Config, join_address, load, load_command, split_address
from kvagent.core.chaos import Fault
from kvagent.errors import ConfigError
from kvagent.explain import settings_markdown, show_config
from kvagent.settings import settings_of


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


def test_arguments_go_before_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'socket = "/file.sock"\nlease_seconds = 5\nbind = "127.0.0.1:7100"\n')
    config = load(path, {"socket": "/flag.sock", "bind": None, "insecure": None})
    assert config.socket == "/flag.sock"
    assert config.lease_seconds == 5.0
    assert config.bind == "127.0.0.1:7100"  # an argument that was not given


def test_flags_then_environment_then_file_then_defaults(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        'socket = "/file"\nhttp = "127.0.0.1:1"\nadvertise = "localhost"\n[chaos]\nseed = 1\n',
    )
    environ = {
        "KVAGENT_SOCKET": "/environ",
        "KVAGENT_HTTP": "127.0.0.1:2",
        "KVAGENT_CHAOS_DROP": "0.5",
        "HOME": "/root",
    }
    config, sources = load_command(path, {"socket": "/flag", "bind": None}, environ)
    assert (config.socket, config.http, config.advertise) == ("/flag", "127.0.0.1:2", "localhost")
    assert (config.chaos.seed, config.chaos.drop, config.chaos.delay) == (1, 0.5, 0.0)
    assert {name: sources[name] for name in ("socket", "http", "advertise", "bind")} == {
        "socket": "--socket",
        "http": "KVAGENT_HTTP",
        "advertise": path,
        "bind": "default",
    }
    assert sources["chaos.seed"] == path
    assert sources["chaos.drop"] == "KVAGENT_CHAOS_DROP"
    assert set(sources) == set(settings_of(Config))


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    path = toml(tmp_path, "lease_seconds = 5\n")
    assert load_command(None, {}, {"KVAGENT_CONFIG": path}).config.lease_seconds == 5
    assert load_command(None, {}, {"KVAGENT_CONFIG": ""}).config.lease_seconds == 30
    with pytest.raises(ConfigError, match="cannot read '/no'"):
        load_command("/no", {}, {"KVAGENT_CONFIG": path})


def test_programs_do_not_read_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVAGENT_LEASE_SECONDS", "7")
    assert load(None, {}).lease_seconds == 30.0


@pytest.mark.parametrize("chaos", [{"drop": 0.25, "kinds": ["claim"]}, Config().chaos])
def test_a_section_as_an_argument(chaos: Any) -> None:
    config = load(None, {"chaos": chaos})
    assert config.chaos.drop == (0.25 if isinstance(chaos, dict) else 0.0)


def test_every_setting_can_be_in_the_file(tmp_path: Path) -> None:
    """...and in a variable."""
    given_values: dict[str, Any] = {
        "socket": "/x.sock",
        "bind": "10.0.0.5:7100",
        "advertise": "node5.example",
        "http": "127.0.0.1:7101",
        "keys": "/x/keys",
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
        "kv_buffer": "host",
        "nics": ["mlx5_0:1", "eth0"],
        "expected_transport": ["rdma", "tcp"],
        "log_level": "debug",
        "log_format": "json",
        "chaos.seed": 3,
        "chaos.drop": 0.25,
        "chaos.duplicate": 0.125,
        "chaos.delay": 0,
        "chaos.reorder": 0.5,
        "chaos.delay_seconds": 2,
        "chaos.kinds": ["claim", "verdict"],
        "chaos.at": [{"message": 3, "fault": "drop"}],
    }
    assert set(given_values) == set(settings_of(Config)), "a new setting: test it here"

    def text(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ", ".join(text(each) for each in value) + "]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} = {text(v)}" for k, v in value.items()) + "}"
        return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')

    path = toml(tmp_path, "".join(f"{k} = {text(v)}\n" for k, v in given_values.items()))
    config = load(path, {})
    for name, value in given_values.items():
        if "." not in name:
            assert getattr(config, name) == (tuple(value) if isinstance(value, list) else value)
    assert config.chaos.kinds == ("claim", "verdict")
    assert [(each.message, each.fault) for each in config.chaos.at] == [(3, Fault.DROP)]
    environ = {
        settings_of(Config)[name].variable: value if isinstance(value, str) else text(value)
        for name, value in given_values.items()
    }
    assert load_command(None, {}, environ).config == config


@pytest.mark.parametrize(
    ("name", "hint"),
    [("lease_second", "lease_seconds"), ("bnd", "bind"), ("fetch-timeout", "fetch_timeout")],
)
def test_unknown_setting_with_a_suggestion(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}' in .*; did you mean '{hint}'"):
        load(toml(tmp_path, f"{name} = 1\n"), {})


def test_unknown_setting_like_no_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'xyzzy' in .*kvagent.toml$"):
        load(toml(tmp_path, "xyzzy = 1\n"), {})


def test_unknown_setting_in_a_section(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'chaos\.dorp' in .*; did you mean 'chaos\.drop'"):
        load(toml(tmp_path, "[chaos]\ndorp = 1\n"), {})
    with pytest.raises(ConfigError, match="did you mean 'bind'"):
        load(None, {"bindd": "127.0.0.1:0"})


def test_unknown_variable_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="KVAGENT_LEASE_SECOND; did you mean 'KVAGENT_LEASE_SEC"):
        load_command(None, {}, {"KVAGENT_LEASE_SECOND": "5"})
    with pytest.raises(ConfigError, match=r"KVAGENT_XYZZY$"):
        load_command(None, {}, {"KVAGENT_XYZZY": "5"})


def test_variables_that_are_not_for_us() -> None:
    """Those of Kubernetes' service links, for services named kvagent and kvagent-http, and that of
    our own scripts."""
    environ = {
        f"KVAGENT_{name}": "tcp://10.0.0.1:7100"
        for name in (
            *("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_CONTROL", "PORT", "PORT_7100_TCP"),
            *("PORT_7100_TCP_ADDR", "PORT_7100_UDP_PROTO", "HTTP_SERVICE_HOST", "HTTP_PORT"),
            *("TORCH", "VLLM"),
        )
    }
    assert load_command(None, {}, environ).config == Config()


@pytest.mark.parametrize(
    ("variable", "value", "problem"),
    [
        ("KVAGENT_LEASE_SECONDS", "soon", "KVAGENT_LEASE_SECONDS='soon': Expected `float`"),
        ("KVAGENT_LEASE_SECONDS", "", "KVAGENT_LEASE_SECONDS"),
        ("KVAGENT_LEASE_SECONDS", "0", "lease_seconds is from KVAGENT_LEASE_SECONDS"),
        ("KVAGENT_PIECE_BYTES", "4MiB", "KVAGENT_PIECE_BYTES='4MiB': Expected `int`"),
        ("KVAGENT_PIECE_BYTES", "1", "piece_bytes is from KVAGENT_PIECE_BYTES; inflight_bytes is "),
        ("KVAGENT_INSECURE", "maybe", "KVAGENT_INSECURE='maybe': Expected `bool`"),
        ("KVAGENT_BIND", "0.0.0.0:1", "bind is from KVAGENT_BIND; advertise is from default"),
        ("KVAGENT_CHAOS_DROP", "2", "chaos.drop = 2.0, from KVAGENT_CHAOS_DROP: Expected `float`"),
        ("KVAGENT_CHAOS_KINDS", "claim", "KVAGENT_CHAOS_KINDS='claim'"),
        ("KVAGENT_CHAOS_KINDS", "[1]", "chaos.kinds = .*, from KVAGENT_CHAOS_KINDS"),
    ],
)
def test_bad_variables_name_themselves(variable: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_command(None, {}, {variable: value})


def test_bad_values_name_their_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'lease_seconds = "5"\n')
    with pytest.raises(ConfigError, match=r"lease_seconds = '5', from .*kvagent.toml: Expected"):
        load(path, {})
    path = toml(tmp_path, "chaos = 5\n")
    with pytest.raises(ConfigError, match=r"chaos in .*kvagent.toml is a section, \[chaos\]"):
        load(path, {})


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


@pytest.mark.parametrize(
    ("variable", "text"), [("KVAGENT_EXPECTED_TRANSPORT", "tcp"), ("KVAGENT_NICS", "mlx5_0:1,")]
)
def test_lists_in_variables(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable}='{text}': write a list as TOML does, for"):
        load_command(None, {}, {variable: text})
    name = variable.removeprefix("KVAGENT_").lower()
    config = load_command(None, {}, {variable: '["tcp"]'}).config
    assert getattr(config, name) == ("tcp",)


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
def test_beyond_loopback_needs_keys_or_insecure(bind: str) -> None:
    with pytest.raises(ConfigError, match="insecure = true"):
        load(None, {"bind": bind, "advertise": "10.0.0.5"})
    for why in ({"insecure": True}, {"keys": "/x/keys"}):
        config = load(None, {"bind": bind, "advertise": "10.0.0.5", **why})
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


# ---------------------------------------------------------------- for people


def test_every_setting_says_what_it_means() -> None:
    for setting in settings_of(Config).values():
        assert setting.meaning, setting.name
    variables = [setting.variable for setting in settings_of(Config).values()]
    assert len(set(variables)) == len(variables)


def test_the_readme_has_the_settings() -> None:
    """When this fails: scripts/readme_tables."""
    text = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    table = text.partition("<!-- settings -->\n")[2].partition("\n<!-- /settings -->")[0]
    assert table == settings_markdown()


def test_effective_settings_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    effective = load_command(None, {"http": "127.0.0.1:1"}, {"KVAGENT_CHAOS_KINDS": "['claim']"})
    show_config(effective, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert shown["http"] == {"value": "127.0.0.1:1", "source": "--http"}
    assert shown["chaos.kinds"] == {"value": ["claim"], "source": "KVAGENT_CHAOS_KINDS"}
    assert shown["bind"] == {"value": "127.0.0.1:0", "source": "default"}
    assert set(shown) == set(settings_of(Config))
    show_config(effective, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert any("chaos.kinds" in line and '["claim"]' in line for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('kinds = ["clam"]', r"no message 'clam'; there are .*\(chaos.kinds is from "),
        ("drop = 0.6\ndelay = 0.6", r"add up to more than 1 \(chaos.drop is from .*chaos.delay is"),
    ],
)
def test_a_drill_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kvagent.toml"
    path.write_text(f"[chaos]\n{text}\n")
    with pytest.raises(ConfigError, match=message):
        load_command(str(path), {}, {})

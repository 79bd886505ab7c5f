"""The files in docker/, looked at by the programs and schemas that they are made for.

No container engine is needed, and nothing is started.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml
from packaging.requirements import Requirement

from kvagent.config import Config, load
from kvagent.settings import tomllib
from kvagent.vllm.options import Options

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
BASE = DOCKER / "kubernetes/base"
TREES = ["base", "overlays/vllm-cpu", "overlays/vllm-gpu"]
OF_A_PLATFORM = "has no program for this platform"


def program(name: str) -> Path:
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name}: its package {OF_A_PLATFORM}")
    return path


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_hadolint_finds_nothing(name: str) -> None:
    assert run(program("hadolint"), DOCKER / name) == ""


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.vllm"])
def test_what_is_copied_is_there_and_let_through(name: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text().split()
    text = (DOCKER / name).read_text()
    copied = {
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    } | set(re.findall(r"source=([^,]+)", text))
    assert "kvagent" in copied
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored


def test_every_package_of_the_image_is_pinned() -> None:
    pins = {}
    for line in (DOCKER / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, pin = line.split("==")
            pins[name.lower()] = pin
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["demo"], *extras["otel"]]:
        wanted = Requirement(text)
        if wanted.marker is None or wanted.marker.evaluate({"python_version": "3.11"}):
            assert wanted.specifier.contains(pins[wanted.name.lower()]), wanted
    assert f"torch=={pins['torch']}" in (ROOT / "scripts/constraints-cpu.txt").read_text()


def test_base_images_have_a_full_version() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^ARG PYTHON=3\.\d+\.\d+-slim-[a-z]+$", text, re.MULTILINE)
    for name in ("compose.yml", "compose.vllm.yml"):
        for service in yaml.safe_load((DOCKER / name).read_text())["services"].values():
            tag = service["image"].rpartition(":")[2]
            assert re.fullmatch(r"v?\d+\.\d+\.\d+|cpu|gpu", tag)


# ---------------------------------------------------------------- compose


def resolve(name: str, *profiles: str) -> dict[str, Any]:
    """What Docker's own client makes of a file."""
    options = [word for profile in profiles for word in ("--profile", profile)]
    found: dict[str, Any] = json.loads(
        run(program("docker-compose"), "-f", DOCKER / name, *options, "config", "--format", "json")
    )
    return found


def test_the_compose_client_takes_both_files() -> None:
    assert len(resolve("compose.yml")["services"]) == 8
    beside = {"keys", "proxy", "prometheus", "grafana"}
    cpu = {"prefill-sidecar", "prefill-cpu", "decode-sidecar", "decode-cpu"}
    gpu = {"keys-root", "prefill-gpu", "decode-gpu"}
    assert resolve("compose.vllm.yml", "cpu")["services"].keys() == beside | cpu
    assert resolve("compose.vllm.yml", "gpu")["services"].keys() == beside | gpu


@pytest.mark.parametrize(
    ("name", "profiles"),
    [("compose.yml", []), ("compose.vllm.yml", ["cpu"]), ("compose.vllm.yml", ["gpu"])],
)
def test_one_service_builds_each_image_and_no_pull_is_tried(name: str, profiles: list[str]) -> None:
    services = resolve(name, *profiles)["services"].values()
    built = [each["image"] for each in services if "build" in each]
    assert sorted(built) == sorted({*built})
    others = {each["image"] for each in services} - {*built}
    assert {image.partition("/")[0] for image in others} == {"prom", "grafana"}


def test_a_tag_is_one_target_of_the_image() -> None:
    """As the Dockerfile's head and the README say, so that no file starts another one's image."""
    tags = {}
    for name, profiles in (("compose.yml", []), ("compose.vllm.yml", ["cpu", "gpu"])):
        for service in resolve(name, *profiles)["services"].values():
            if "build" in service and service["build"]["dockerfile"] == "docker/Dockerfile":
                assert service["image"] not in tags
                tags[service["image"]] = service["build"]["target"]
    assert tags == {"kvagent-demo:cpu": "engine", "kvagent:cpu": "sidecar"}
    text = (DOCKER / "Dockerfile").read_text()
    assert "-t kvagent-demo:cpu --target engine" in text
    assert "FROM sidecar" in text.splitlines()[-1]


def test_each_gpu_container_sees_both_gpus_and_uses_one() -> None:
    services = resolve("compose.vllm.yml", "gpu")["services"]
    used = []
    for side in ("prefill", "decode"):
        service = services[f"{side}-gpu"]
        (devices,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices["device_ids"] == ["0", "1"]
        assert (service["ipc"], service["pid"]) == ("host", "host")
        assert "devices" not in service, "Docker starts nothing with a device that is missing"
        used.append(service["environment"]["CUDA_VISIBLE_DEVICES"])
    assert used == ["0", "1"]


def test_the_rdma_file_adds_to_both_gpu_containers() -> None:
    files = ("-f", DOCKER / "compose.vllm.yml", "-f", DOCKER / "compose.rdma.yml")
    options = ("--profile", "gpu", "config", "--format", "json")
    services = json.loads(run(program("docker-compose"), *files, *options))["services"]
    plain = resolve("compose.vllm.yml", "gpu")["services"]
    assert services.keys() == plain.keys()
    for name, service in services.items():
        added = {key: value for key, value in service.items() if plain[name].get(key) != value}
        assert added.keys() == (
            {"devices", "ulimits", "cap_add"} if name.endswith("-gpu") else set()
        )


def test_vllm_gets_settings_that_its_connector_takes() -> None:
    roles = {}
    for name, service in resolve("compose.vllm.yml", "cpu", "gpu")["services"].items():
        for word in service.get("command") or []:
            if word.startswith("--kv-transfer-config="):
                roles[name] = connector(word)
    expected = {f"{side}-{kind}": side for side in ("prefill", "decode") for kind in ("cpu", "gpu")}
    assert {name: role for name, (role, _) in roles.items()} == {
        name: "kv_producer" if side == "prefill" else "kv_consumer"
        for name, side in expected.items()
    }
    for name, (_, extra) in roles.items():
        assert extra.get("embedded", False) == name.endswith("-gpu")


def connector(word: str) -> tuple[str, dict[str, Any]]:
    """The role and the connector's own settings, checked as the connector checks them."""
    config = json.loads(word.removeprefix("--kv-transfer-config="))
    assert config["kv_connector_module_path"] == "kvagent.vllm"
    assert config["kv_connector"] == "KVAgentConnector"
    assert config["kv_load_failure_policy"] == "recompute"
    extra: dict[str, Any] = config["kv_connector_extra_config"]
    options = msgspec.convert(extra, Options)
    if options.embedded:
        settings = {
            key: "10.0.0.1" if value == "$(POD_IP)" else value
            for key, value in options.settings.items()
        }
        load(None, settings)
    else:
        assert options.socket_of("", 3, 0) == "/run/kvagent/3.sock"
    return config["kv_role"], extra


def test_prometheus_reads_names_that_are_there_with_every_file() -> None:
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    targets = config["scrape_configs"][0]["static_configs"][0]["targets"]
    for services in (
        resolve("compose.yml")["services"],
        resolve("compose.vllm.yml", "cpu")["services"],
        resolve("compose.vllm.yml", "gpu")["services"],
    ):
        names = set(services)
        for service in services.values():
            networks = service.get("networks") or {}
            names |= {a for each in networks.values() for a in (each or {}).get("aliases", ())}
        for target in targets:
            assert target.endswith(":9100")
            assert target.removesuffix(":9100") in names


def test_grafana_finds_its_dashboard() -> None:
    folder = DOCKER / "grafana/provisioning"
    provider = yaml.safe_load((folder / "dashboards/kvagent.yml").read_text())["providers"][0]
    for name in ("compose.yml", "compose.vllm.yml"):
        grafana = yaml.safe_load((DOCKER / name).read_text())["services"]["grafana"]
        mounts = dict(text.split(":")[:2] for text in grafana["volumes"])
        path = mounts["./grafana/kvagent.json"]
        assert path.startswith(provider["options"]["path"] + "/")
        assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == path
        for source in mounts:
            assert not source.startswith(".") or (DOCKER / source).exists()


def test_the_readme_draws_all_of_the_compose_file() -> None:
    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Two nodes") :]
    section = section[: section.index("\n## ")]
    compose = yaml.safe_load((DOCKER / "compose.yml").read_text())
    for kind in ("services", "networks", "volumes"):
        for name in compose[kind]:
            assert name in section, f"{kind}: {name}"
    for service in compose["services"].values():
        for port in service.get("ports", ()):
            assert port.rpartition(":")[2] in section


# ---------------------------------------------------------------- Kubernetes


def documents(text: str) -> Iterator[dict[str, Any]]:
    yield from (document for document in yaml.safe_load_all(text) if document)


def base() -> list[dict[str, Any]]:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return [
        document
        for name in kustomization["resources"]
        for document in documents((BASE / name).read_text())
    ]


def built(tree: str) -> list[dict[str, Any]]:
    """What kustomize makes of it."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl to put the overlays together")
    return list(documents(run("kubectl", "kustomize", DOCKER / "kubernetes" / tree)))


def validate(manifest: dict[str, Any]) -> None:
    if manifest["kind"] == "PodMonitor":
        return  # not Kubernetes' own: below
    kubernetes_validate.validate(manifest, "1.33", strict=True)


def test_the_manifests_are_valid() -> None:
    manifests = base()
    kinds = [manifest["kind"] for manifest in manifests]
    assert sorted(set(kinds)) == ["Deployment", "NetworkPolicy", "PodMonitor", "Service"]
    for manifest in manifests:
        validate(manifest)


@pytest.mark.parametrize("tree", TREES)
def test_what_kustomize_builds_is_valid(tree: str) -> None:
    manifests = built(tree)
    assert len(manifests) == len(base())
    for manifest in manifests:
        validate(manifest)


def test_a_wrong_manifest_would_be_noticed() -> None:
    deployment = next(each for each in base() if each["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["initContainers"][1]["restartPolicies"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(deployment)


def test_the_pod_monitor_is_valid() -> None:
    # Imported here, since it takes some seconds.
    from cloudcoil.models.prometheus_operator import v1

    monitor = next(each for each in base() if each["kind"] == "PodMonitor")
    model = v1.PodMonitor.model_validate(monitor)
    # What the schema does not know is left out by the model.
    assert model.model_dump(by_alias=True, exclude_unset=True, mode="json") == monitor


def pods() -> dict[str, dict[str, Any]]:
    """Pod templates by component."""
    return {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: each["spec"][
            "template"
        ]
        for each in base()
        if each["kind"] == "Deployment"
    }


def sidecar_of(pod: dict[str, Any]) -> dict[str, Any]:
    (found,) = (each for each in pod["spec"]["initContainers"] if each["name"] == "sidecar")
    return dict(found)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_pods_run_what_the_compose_file_runs(side: str) -> None:
    services = yaml.safe_load((DOCKER / "compose.yml").read_text())["services"]
    pod = pods()[side]
    sidecar, engine = sidecar_of(pod), pod["spec"]["containers"][0]
    for container, service in ((sidecar, "sidecar"), (engine, "engine")):
        theirs = [word for word in services[f"{side}-{service}"]["command"] if "=" in word]
        ours = dict(word.split("=", 1) for word in container["args"] if "=" in word)
        for name, value in (word.split("=", 1) for word in theirs):
            named = {"--advertise": "$(POD_IP)", "--engine-id": "$(POD_NAME)"}
            assert ours[name] == named.get(name, value)
    environment = {each["name"]: each.get("value") for each in sidecar["env"]}
    for name, value in services[f"{side}-sidecar"]["environment"].items():
        assert environment[name] == value
    assert pod["spec"]["securityContext"]["runAsUser"] == 10001


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_the_sidecar_is_a_native_one_with_probes_and_a_drain(side: str) -> None:
    pod = pods()[side]
    sidecar, engine = sidecar_of(pod), pod["spec"]["containers"][0]
    assert sidecar["restartPolicy"] == "Always"
    assert sidecar["startupProbe"]["httpGet"]["path"] == "/healthz"
    assert sidecar["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz"
    for container in (sidecar, engine):
        assert {"startupProbe", "readinessProbe", "livenessProbe", "lifecycle"} <= container.keys()
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        # A hung container is killed, and not asked to drain.
        assert container["livenessProbe"]["terminationGracePeriodSeconds"] == 5
    assert pod["spec"]["terminationGracePeriodSeconds"] > Config().drain_timeout + 30
    shared = {mount["name"] for mount in sidecar["volumeMounts"]}
    assert shared & {mount["name"] for mount in engine["volumeMounts"]} == {"socket", "tmp"}


def test_labels_ports_and_names_fit_together() -> None:
    manifests = base()
    for service in (each for each in manifests if each["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        chosen = [pod for pod in pods().values() if selector <= pod["metadata"]["labels"].items()]
        assert chosen, service["metadata"]["name"]
        for pod in chosen:
            # Names of native sidecars' ports are for Services from Kubernetes 1.32 on.
            targets = {
                port["containerPort"]
                for container in pod["spec"].get("initContainers", [])
                for port in container.get("ports", [])
            } | {
                port["name"]
                for container in pod["spec"]["containers"]
                for port in container.get("ports", [])
            }
            assert {port["targetPort"] for port in service["spec"]["ports"]} <= targets
            numbers = {
                port["name"]: port["containerPort"]
                for container in pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
                for port in container.get("ports", [])
            }
            for port in service["spec"]["ports"]:
                assert port["port"] == numbers[port["name"]]
    monitor = next(each for each in manifests if each["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in sidecar_of(pods()["prefill"])["ports"]}
    services = {each["metadata"]["name"] for each in manifests if each["kind"] == "Service"}
    for word in pods()["proxy"]["spec"]["containers"][0]["args"]:
        if "http://" in word:
            assert word.partition("http://")[2].partition(":")[0] in services


def test_the_network_policy_lets_through_what_sidecars_use_and_no_more() -> None:
    policy = next(each for each in base() if each["kind"] == "NetworkPolicy")["spec"]
    sidecar = sidecar_of(pods()["prefill"])
    first, last = next(
        each["value"] for each in sidecar["env"] if each["name"] == "UCX_TCP_PORT_RANGE"
    ).split("-")
    fabric = [
        {"protocol": "TCP", "port": 7100},
        {"protocol": "TCP", "port": int(first), "endPort": int(last)},
    ]
    assert policy["ingress"][0]["ports"] == fabric
    assert policy["egress"][0]["ports"] == fabric
    assert policy["ingress"][0]["from"] == policy["egress"][0]["to"]
    open_to = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert open_to == {7100, 7200, 8000, 9100}
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    (router,) = policy["ingress"][1]["from"]
    wanted = router["podSelector"]["matchLabels"].items()
    labels = {name: pod["metadata"]["labels"].items() for name, pod in pods().items()}
    assert [name for name in labels if wanted <= labels[name]] == ["proxy"]
    assert ("app.kubernetes.io/name", "kvagent") in wanted


@pytest.mark.parametrize("tree", TREES[1:])
def test_overlays_give_vllm_settings_that_its_connector_takes(tree: str) -> None:
    roles = set()
    for manifest in built(tree):
        component = manifest["metadata"]["name"].removeprefix("kvagent-")
        if manifest["kind"] != "Deployment" or component == "proxy":
            continue
        pod = manifest["spec"]["template"]["spec"]
        (word,) = (
            each
            for each in pod["containers"][0]["args"]
            if each.startswith("--kv-transfer-config=")
        )
        role, extra = connector(word)
        roles.add((component, role))
        embedded = extra.get("embedded", False)
        assert embedded == tree.endswith("gpu")
        assert ("sidecar" in {each["name"] for each in pod["initContainers"]}) == (not embedded)
        assert "lifecycle" not in pod["containers"][0] or not embedded
    assert roles == {("prefill", "kv_producer"), ("decode", "kv_consumer")}


def test_the_images_have_the_projects_version() -> None:
    images = yaml.safe_load((BASE / "kustomization.yaml").read_text())["images"]
    assert {image["newTag"] for image in images} == {version("kvagent")}

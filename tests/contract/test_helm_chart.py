"""`deploy/helm/tilewire`: valid by schema for each device, and the same service as kustomize makes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.contract.test_kubernetes_files import KUBERNETES_VERSION, built, only, with_component
from tests.support.helm import Chart, merged
from tilewire import __version__
from tilewire.service.cli.serve import variable_name
from tilewire.service.config.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tilewire"
CHART = Chart(FOLDER)
SCHEMA = json.loads((FOLDER / "values.schema.json").read_text(encoding="utf-8"))
ALL: dict[str, Any] = {
    "device": "rocm",
    "image": {"repository": "example.org/tilewire", "tag": "rocm"},
    "imagePullSecrets": [{"name": "pull"}],
    "apiKeysSecret": "keys",
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "own", "operator": "Exists"}],
    "podLabels": {"team": "search"},
    "autoscaling": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "service": {"type": "LoadBalancer", "port": 8080},
    "grpc": {"enabled": True, "port": 9001},
    "settings": {"TILEWIRE_ACCESS_LOG": "true"},
}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "cuda": {"device": "cuda", "image": {"tag": "cuda"}},
    "rocm": {"device": "rocm", "image": {"tag": "rocm"}},
    "grpc": {"grpc": {"enabled": True}},
    "all": ALL,
}
OVERLAY = {"none": "base", "cuda": "cuda", "rocm": "rocm"}


def pod_of(resources: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = only(resources, "Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize("case", CASES)
def test_what_the_chart_makes_is_valid_to_the_last_key(case: str) -> None:
    jsonschema.validate(merged(CHART.values, CASES[case]), SCHEMA)
    for resource in CHART.resources("tw", CASES[case]):
        kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)


@pytest.mark.parametrize("case", OVERLAY)
def test_it_is_the_service_that_kustomize_makes(case: str) -> None:
    ours, theirs = pod_of(CHART.resources("tilewire", CASES[case])), pod_of(built(OVERLAY[case]))
    mine, other = ours["containers"][0], theirs["containers"][0]
    for key in (
        "ports",
        "startupProbe",
        "livenessProbe",
        "readinessProbe",
        "lifecycle",
        "resources",
        "securityContext",
    ):
        assert mine[key] == other[key], key
    assert mine["image"] == other["image"]
    assert (mine["env"] or None) == other.get("env")
    assert mine["volumeMounts"] == other["volumeMounts"]
    for key in ("volumes", "securityContext", "terminationGracePeriodSeconds", "enableServiceLinks"):
        assert ours[key] == theirs[key], key
    assert (ours["tolerations"] or None) == theirs.get("tolerations")


def test_settings_are_those_of_kustomize() -> None:
    mine = only(CHART.resources("tilewire", {}), "ConfigMap")["data"]
    assert mine == only(built("base"), "ConfigMap")["data"]


@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment", "NetworkPolicy", "Service"])
def test_grpc_is_added_as_by_the_component(kind: str, tmp_path: Path) -> None:
    mine = only(CHART.resources("tilewire", CASES["grpc"]), kind)
    other = only(with_component(tmp_path, "base", "grpc"), kind)
    match kind:
        case "ConfigMap":
            assert mine["data"] == other["data"]
        case "Deployment":
            (ours,), (theirs,) = (one["spec"]["template"]["spec"]["containers"] for one in (mine, other))
            assert ours["ports"] == theirs["ports"]
        case "NetworkPolicy":
            assert mine["spec"]["ingress"] == other["spec"]["ingress"]
        case _:
            assert mine["spec"]["ports"] == other["spec"]["ports"]


def test_settings_are_settings() -> None:
    named = set(CHART.values["settings"]) | {"TILEWIRE_API_KEYS_FILE", "TILEWIRE_DEVICE"}
    assert named <= {variable_name(name) for name in Settings.model_fields}


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "Service"])
def test_the_rest_says_what_kustomize_says(kind: str) -> None:
    mine, other = (only(resources, kind)["spec"] for resources in (CHART.resources("tilewire", {}), built("base")))
    for spec in (mine, other):
        for holder, key in ((spec, "selector"), (spec, "podSelector")):
            holder.pop(key, None)
    assert mine == other


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods(case: str) -> None:
    resources = CHART.resources("one", CASES[case])
    labels = only(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [only(resources, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors.append(only(resources, "Service")["spec"]["selector"])
    selectors.append(only(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
    for selector in selectors:
        assert selector.items() <= labels.items()
    other = only(CHART.resources("two", CASES[case]), "Service")["spec"]["selector"]
    assert not other.items() <= labels.items(), "two releases in one namespace keep apart"


def test_every_value_has_its_effect() -> None:
    resources = CHART.resources("tw", ALL)
    deployment, pod = only(resources, "Deployment"), pod_of(resources)
    assert deployment["spec"]["replicas"] == 2
    assert {one["kind"] for one in resources}.isdisjoint({"HorizontalPodAutoscaler", "NetworkPolicy"})
    container = pod["containers"][0]
    assert container["image"] == "example.org/tilewire:rocm"
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "TILEWIRE_DEVICE": "cuda:0",
        "TILEWIRE_API_KEYS_FILE": "/etc/tilewire/keys.toml",
    }
    assert pod["volumes"][-1]["secret"]["secretName"] == "keys"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert [one["key"] for one in pod["tolerations"]] == ["amd.com/gpu", "own"]
    assert only(resources, "ConfigMap")["data"]["TILEWIRE_ACCESS_LOG"] == "true"
    assert only(resources, "Service")["spec"]["ports"][0]["port"] == 8080
    assert only(resources, "Service")["spec"]["ports"][1]["port"] == 9001
    assert container["ports"][1]["containerPort"] == 9001
    assert only(resources, "ConfigMap")["data"]["TILEWIRE_GRPC_PORT"] == "9001"
    assert "gRPC: tw.default.svc:9001" in CHART.render("tw", ALL)["NOTES.txt"]
    assert "gRPC" not in CHART.render("tw", {})["NOTES.txt"]
    assert "port-forward service/tw 8000:8080" in CHART.render("tw", ALL)["NOTES.txt"]


def test_other_settings_roll_the_pods() -> None:
    def checksum(settings: dict[str, str]) -> str:
        resources = CHART.resources("tw", {"settings": settings})
        annotations = only(resources, "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/settings"])

    assert checksum({"TILEWIRE_ACCESS_LOG": "true"}) != checksum({"TILEWIRE_ACCESS_LOG": "false"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "tpu"},
        {"settings": {"PORT": "1"}},
        {"replica": 2},
        {"service": {"port": 0}},
        {"grpc": {"port": 8000}},
    ],
)
def test_a_value_that_cannot_be_right_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(merged(CHART.values, wrong), SCHEMA)


def test_versions_are_those_of_the_package() -> None:
    assert CHART.metadata["appVersion"] == __version__


@pytest.mark.parametrize("case", CASES)
def test_helm_renders_the_same(case: str, tmp_path: Path) -> None:
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed")
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(CASES[case]), encoding="utf-8")
    for command in (["lint", "--strict"], ["template", "tw"]):
        done = subprocess.run(
            ["helm", *command, str(FOLDER), "--values", str(values)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    rendered = {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout) if one}
    assert rendered == {(one["kind"], one["metadata"]["name"]): one for one in CHART.resources("tw", CASES[case])}

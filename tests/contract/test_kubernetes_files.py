"""`deploy/kubernetes`, `deploy/kserve`, `deploy/compose.yaml`: built by kubectl's kustomize, valid by schema, and at one.

There is no package with the schemas of KServe's resources: what is Kubernetes' own inside them is validated, the rest asserted.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose

from tests.support.programs import find_program
from tilewire.service.cli.serve import variable_name
from tilewire.service.config.settings import Settings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
KUBERNETES_VERSION = "1.37"
OVERLAYS = ["base", "cuda", "rocm"]
EXIT_S = 5.0
MANIFESTS = [DEPLOY / "kserve" / "servingruntime.yaml", DEPLOY / "kserve" / "inferenceservice.yaml"]
GPUS = {"base": None, "cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}

overlays = pytest.mark.parametrize("overlay", OVERLAYS)


@functools.cache
def text_of(overlay: str) -> str:
    """What `kubectl kustomize` makes of a folder."""
    done = subprocess.run(
        [find_program("kubectl"), "kustomize", str(DEPLOY / "kubernetes" / overlay)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning is a deprecated field"
    return done.stdout


def built(overlay: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text_of(overlay)))


def only(resources: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (one,) = [resource for resource in resources if resource["kind"] == kind]
    return one


def pod_of(overlay: str) -> dict[str, Any]:
    spec: dict[str, Any] = only(built(overlay), "Deployment")["spec"]["template"]["spec"]
    return spec


def runtime() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(MANIFESTS[0].read_text(encoding="utf-8"))["spec"]
    return spec


def container_of(pod: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod around a container of ours that Kubernetes runs, and the container."""
    found = runtime() if pod == "kserve" else pod_of(pod)
    return found, found["containers"][0]


# ── schemas ───────────────────────────────────────────────────────────────────────────────────────


@overlays
def test_what_kustomize_builds_is_valid_to_the_last_key(overlay: str) -> None:
    resources = built(overlay)
    kinds = {"ServiceAccount", "ConfigMap", "Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy"}
    assert {resource["kind"] for resource in resources} == kinds | {"HorizontalPodAutoscaler"}
    for resource in resources:
        kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)


def test_the_schemas_refuse_an_unknown_key() -> None:
    wrong = only(built("base"), "Deployment")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES_VERSION, strict=True)


def test_the_pod_inside_the_serving_runtime_is_valid() -> None:
    spec = runtime()
    own = {"annotations", "protocolVersions", "supportedModelFormats"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "tilewire", "annotations": spec["annotations"]}}
    pod["spec"] = {key: value for key, value in spec.items() if key not in own}
    kubernetes_validate.validate(pod, KUBERNETES_VERSION, strict=True)


def test_compose_is_valid() -> None:
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    # As Compose does, defaults are filled in and YAML's merge keys resolved first: the schema knows what comes out.
    spec = PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text))).to_spec()
    assert spec.services is not None
    assert spec.services.keys() == {"cuda", "rocm", "cpu", "prometheus", "grafana"}


def test_compose_with_grpc_is_valid() -> None:
    text = (DEPLOY / "compose.grpc.yaml").read_text(encoding="utf-8")
    spec = PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text))).to_spec()
    assert spec.services is not None
    assert spec.services.keys() == {"cuda", "rocm", "cpu"}
    for service in yaml.safe_load(text)["services"].values():
        port = service["environment"]["TILEWIRE_GRPC_PORT"]
        assert Settings(grpc_port=port).grpc_port == int(port)
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]


def with_component(tmp_path: Path, overlay: str, component: str) -> list[dict[str, Any]]:
    """What an overlay makes with a component."""

    def path_to(name: str) -> str:
        return os.path.relpath(DEPLOY / "kubernetes" / name, tmp_path.resolve())

    folder = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [path_to(overlay)],
        "components": [path_to(component)],
    }
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(folder), encoding="utf-8")
    command = [find_program("kubectl"), "kustomize", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("overlay", ["cuda", "rocm"])
def test_the_component_adds_grpc_to_an_overlay(overlay: str, tmp_path: Path) -> None:
    resources = with_component(tmp_path, overlay, "grpc")
    for resource in resources:
        kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)
    port = only(resources, "ConfigMap")["data"]["TILEWIRE_GRPC_PORT"]
    (container,) = only(resources, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert {one["name"]: one["containerPort"] for one in container["ports"]} == {"http": 8000, "grpc": int(port)}
    assert {one["name"]: one["targetPort"] for one in only(resources, "Service")["spec"]["ports"]} == {
        "http": "http",
        "grpc": "grpc",
    }
    (rule,) = only(resources, "NetworkPolicy")["spec"]["ingress"]
    assert [one["port"] for one in rule["ports"]] == ["http", "grpc"]


# ── what they say ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [*OVERLAYS, "kserve"])
def test_containers_are_confined(name: str) -> None:
    pod, container = container_of(name)
    context = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] == 10001
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {"/tmp", "/var/cache/tilewire", "/dev/shm"}
    volumes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"]}
    assert volumes[mounts["/dev/shm"]]["medium"] == "Memory"
    assert "medium" not in volumes[mounts["/var/cache/tilewire"]]


@pytest.mark.parametrize("name", [*OVERLAYS, "kserve"])
def test_probes_ask_what_answers(name: str) -> None:
    _pod, container = container_of(name)
    (port,) = container["ports"]
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} <= {port["containerPort"], port.get("name")}
    live, ready = ("/v2/health/live", "/v2/health/ready") if name == "kserve" else ("/healthz", "/readyz")
    assert [probes[kind]["path"] for kind in ("startup", "liveness", "readiness")] == [ready, live, ready]
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


@overlays
def test_settings_are_settings(overlay: str) -> None:
    known = {variable_name(name) for name in Settings.model_fields}
    config = only(built(overlay), "ConfigMap")
    env = {one["name"]: one["value"] for one in pod_of(overlay)["containers"][0].get("env", [])}
    assert {*config["data"], *env} <= known
    assert Settings(
        **{name.removeprefix("TILEWIRE_").lower(): value for name, value in {**config["data"], **env}.items()}
    )


def test_settings_of_compose_and_kserve_are_settings() -> None:
    known = {variable_name(name) for name in Settings.model_fields}
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    for name in ("cuda", "rocm", "cpu"):
        assert set(compose[name]["environment"]) <= known
    assert {one["name"] for one in runtime()["containers"][0]["env"]} <= known


def test_grace_periods_hold_the_drain() -> None:
    config = only(built("base"), "ConfigMap")["data"]
    drain_s = float(config["TILEWIRE_DRAIN_TIMEOUT_S"])
    pod = pod_of("base")
    waits_s = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= waits_s + drain_s + 3 * EXIT_S
    predictor = yaml.safe_load(MANIFESTS[1].read_text(encoding="utf-8"))["spec"]["predictor"]
    drain_s = Settings.model_fields["drain_timeout_s"].default
    assert predictor["terminationGracePeriodSeconds"] >= drain_s + 3 * EXIT_S
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["cuda"]
    assert float(compose["stop_grace_period"].removesuffix("s")) >= drain_s + 3 * EXIT_S


@overlays
def test_an_overlay_gives_each_replica_its_device(overlay: str) -> None:
    container = pod_of(overlay)["containers"][0]
    limits = dict(container["resources"]["limits"])
    assert limits.pop("memory")
    assert limits == ({GPUS[overlay]: "1"} if GPUS[overlay] else {})
    assert container["image"] == f"tilewire:{'cpu' if overlay == 'base' else overlay}"


@overlays
def test_selectors_find_the_pods(overlay: str) -> None:
    resources = built(overlay)
    deployment = only(resources, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    wanted = [
        deployment["selector"]["matchLabels"],
        only(resources, "Service")["spec"]["selector"],
        only(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        only(resources, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ]
    for selector in wanted:
        assert selector
        assert selector.items() <= labels.items()
    (rule,) = only(resources, "NetworkPolicy")["spec"]["ingress"]
    assert rule["from"][0]["podSelector"] == {"matchLabels": {"tilewire-client": "true"}}
    assert only(resources, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == "tilewire"
    assert "replicas" not in deployment, "the autoscaler says how many"
    least = only(resources, "HorizontalPodAutoscaler")["spec"]["minReplicas"]
    assert only(resources, "PodDisruptionBudget")["spec"]["maxUnavailable"] < least


def test_the_autoscaler_reads_what_the_adapter_offers() -> None:
    (metric,) = only(built("base"), "HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith(rule["name"]["matches"])
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"][0]
    labels = {one["target_label"] for one in scraped["relabel_configs"] if "target_label" in one}
    assert set(rule["resources"]["overrides"]) <= labels
    assert set(re.findall(r"(\w+)!=\"\"", rule["seriesQuery"])) <= labels


def test_the_scrape_in_kubernetes_finds_the_pods() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text())["scrape_configs"][0]
    by_label, by_port = scraped["relabel_configs"][:2]
    pod = only(built("base"), "Deployment")["spec"]["template"]
    assert by_label == {
        "source_labels": ["__meta_kubernetes_pod_label_app_kubernetes_io_name"],
        "regex": pod["metadata"]["labels"]["app.kubernetes.io/name"],
        "action": "keep",
    }
    assert by_port == {
        "source_labels": ["__meta_kubernetes_pod_annotation_prometheus_io_port"],
        "target_label": "__meta_kubernetes_pod_container_port_number",
        "action": "keepequal",
    }
    (port,) = pod["spec"]["containers"][0]["ports"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port["containerPort"])


# ── scale ───────────────────────────────────────────────────────────────────────────────────────


# Neither the Gateway API's kinds nor Envoy Gateway's are among the schemas.
GATEWAY_GROUPS = ("gateway.networking.k8s.io/", "gateway.envoyproxy.io/")


def scale_of(kind: str) -> list[dict[str, Any]]:
    return [resource for resource in built("scale") if resource["kind"] == kind]


def test_what_is_built_for_scale_is_valid() -> None:
    resources = built("scale")
    own = [resource for resource in resources if not resource["apiVersion"].startswith(GATEWAY_GROUPS)]
    assert {resource["kind"] for resource in own} == {resource["kind"] for resource in built("cuda")} | {
        "PersistentVolumeClaim"
    }
    for resource in own:
        kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)
    assert sorted(resource["kind"] for resource in resources if resource not in own) == sorted(
        ["Gateway", "ClientTrafficPolicy", "HTTPRoute", "HTTPRoute", "BackendTrafficPolicy", "BackendTrafficPolicy"]
    )


def test_the_volume_of_scale_is_the_store_of_every_pod() -> None:
    (claim,) = scale_of("PersistentVolumeClaim")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    pod = pod_of("scale")
    (volume,) = [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    container = pod["containers"][0]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == volume["name"]]
    # Uploads are written there.
    assert "readOnly" not in mount
    assert "readOnly" not in volume["persistentVolumeClaim"]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["TILEWIRE_STORE"] == mount["mountPath"]
    assert set(env) <= {variable_name(name) for name in Settings.model_fields}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_gateway_hashes_by_the_header_that_its_route_asks_for() -> None:
    (gateway,) = scale_of("Gateway")
    routes = {route["metadata"]["name"]: route["spec"] for route in scale_of("HTTPRoute")}
    service = only(built("scale"), "Service")
    for spec in routes.values():
        assert [parent["name"] for parent in spec["parentRefs"]] == [gateway["metadata"]["name"]]
        (rule,) = spec["rules"]
        assert rule["backendRefs"] == [
            {"name": service["metadata"]["name"], "port": service["spec"]["ports"][0]["port"]}
        ]
    policies = {policy["spec"]["targetRefs"][0]["name"]: policy["spec"] for policy in scale_of("BackendTrafficPolicy")}
    assert policies.keys() == routes.keys()
    (header,) = routes["tilewire-residents"]["rules"][0]["matches"][0]["headers"]
    hashed = policies["tilewire-residents"]["loadBalancer"]
    assert hashed["type"] == "ConsistentHash"
    assert hashed["consistentHash"]["header"]["name"] == header["name"] == "X-Tilewire-Key"
    assert policies["tilewire-any"]["loadBalancer"] == {"type": "LeastRequest"}
    readiness = pod_of("scale")["containers"][0]["readinessProbe"]["httpGet"]["path"]
    for policy in policies.values():
        assert policy["healthCheck"]["active"]["http"]["path"] == readiness
        assert "retriable-status-codes" not in policy["retry"]["retryOn"]["triggers"]
        kept_s = policy["timeout"]["http"]["connectionIdleTimeout"]
        assert float(kept_s.removesuffix("s")) < Settings.model_fields["keep_alive_s"].default


def test_the_gateway_leaves_names_with_slashes_as_they_are() -> None:
    (gateway,) = scale_of("Gateway")
    (policy,) = scale_of("ClientTrafficPolicy")
    (target,) = policy["spec"]["targetRefs"]
    assert (target["kind"], target["name"]) == (gateway["kind"], gateway["metadata"]["name"])
    assert policy["spec"]["path"] == {"escapedSlashesAction": "KeepUnchanged", "disableMergeSlashes": True}


def test_the_gateways_pods_may_come_in() -> None:
    (rule,) = only(built("scale"), "NetworkPolicy")["spec"]["ingress"]
    namespaces = [
        one["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for one in rule["from"]
        if "namespaceSelector" in one
    ]
    assert namespaces == ["monitoring", "envoy-gateway-system"]


def test_scale_grows_by_the_queue_and_shrinks_slowly() -> None:
    spec = only(built("scale"), "HorizontalPodAutoscaler")["spec"]
    (metric,) = spec["metrics"]
    assert metric["pods"]["metric"]["name"] == "tilewire_queue_depth"
    assert spec["minReplicas"] < spec["maxReplicas"]
    up, down = (spec["behavior"][way]["policies"][0] for way in ("scaleUp", "scaleDown"))
    assert up["value"] / up["periodSeconds"] > 10 * down["value"] / down["periodSeconds"]


# ── KServe ────────────────────────────────────────────────────────────────────────────────────────


def test_kserve_finds_the_runtime_and_its_metrics() -> None:
    kinds = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in MANIFESTS]
    assert [(one["apiVersion"], one["kind"]) for one in kinds] == [
        ("serving.kserve.io/v1alpha1", "ServingRuntime"),
        ("serving.kserve.io/v1beta1", "InferenceService"),
    ]
    spec = runtime()
    (container,) = spec["containers"]
    assert container["name"] == "kserve-container"
    (port,) = container["ports"]
    assert spec["protocolVersions"] == ["v2"]
    assert spec["annotations"] == {
        "prometheus.kserve.io/port": str(port["containerPort"]),
        "prometheus.kserve.io/path": "/metrics",
    }
    assert {"name": "TILEWIRE_PORT", "value": str(port["containerPort"])} in container["env"]
    model = kinds[1]["spec"]["predictor"]["model"]
    assert model["runtime"] == kinds[0]["metadata"]["name"]
    assert model["protocolVersion"] in spec["protocolVersions"]
    (offered,) = spec["supportedModelFormats"]
    assert model["modelFormat"].items() <= offered.items()

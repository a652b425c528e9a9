"""`deploy/helm`: what Helm makes of the chart is valid by schema for each device, and the same service as kustomize makes."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.contract.test_kubernetes_files import KUBERNETES_VERSION, built, only, with_component
from tests.support.programs import find_program
from tilewire import __version__
from tilewire.service.cli.serve import variable_name
from tilewire.service.config.parsers import devices_of
from tilewire.service.config.settings import Settings
from tilewire.service.supervisor.processes import UNPINNED_BYTES_PER_S

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "tilewire"
DEFAULTS = yaml.safe_load((FOLDER / "values.yaml").read_text(encoding="utf-8"))
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
    "store": {"enabled": True, "size": "2Ti", "storageClass": "cephfs"},
}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "cuda": {"device": "cuda", "image": {"tag": "cuda"}},
    "rocm": {"device": "rocm", "image": {"tag": "rocm"}},
    "grpc": {"grpc": {"enabled": True}},
    "store": {"device": "cuda", "store": {"enabled": True}},
    "claim": {"store": {"enabled": True, "existingClaim": "weights"}},
    "nfs": {"store": {"enabled": True, "nfs": {"server": "nfs.example.org", "path": "/weights"}}},
    "keys": {"apiKeysSecret": "keys", "grpc": {"enabled": True}},
    "metrics": {"settings": {"TILEWIRE_METRICS_PORT": "9100", "TILEWIRE_HOST": "::"}},
    # As `--set resources.limits=null` leaves a value out.
    "bare": {"device": "rocm", "rocmGroups": None, "resources": {"limits": None, "requests": None}, "settings": None},
    "all": ALL,
}
OVERLAY = {"none": "base", "cuda": "cuda", "rocm": "rocm"}


def helm(*arguments: str, values: dict[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs Helm with the values of a case on its standard input."""
    given = ["--values", "-"] if values is not None else []
    return subprocess.run(
        [find_program("helm"), *arguments, *given],
        input=yaml.safe_dump(values),
        capture_output=True,
        text=True,
        check=False,
    )


@functools.cache
def _rendered(release: str, values: str, chart: Path) -> str:
    done = helm("template", release, str(chart), values=json.loads(values))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def resources_of(release: str, values: dict[str, Any], chart: Path = FOLDER) -> list[dict[str, Any]]:
    """Resources that Helm makes of the chart."""
    text = _rendered(release, json.dumps(values), chart)
    return [one for one in yaml.safe_load_all(text) if one is not None]


def pod_of(resources: list[dict[str, Any]]) -> dict[str, Any]:
    spec: dict[str, Any] = only(resources, "Deployment")["spec"]["template"]["spec"]
    return spec


@pytest.fixture(scope="module")
def notes_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the chart that renders its notes as a resource: Helm shows them only when it installs."""
    chart = tmp_path_factory.mktemp("notes") / "tilewire"
    shutil.copytree(FOLDER, chart)
    (chart / "templates" / "NOTES.txt").rename(chart / "notes.txt")
    (chart / "templates" / "notes.yaml").write_text(
        'kind: Notes\ntext: {{ tpl (.Files.Get "notes.txt") . | toJson }}\n'
    )
    return chart


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_complain_about(case: str) -> None:
    done = helm("lint", "--strict", str(FOLDER), values=CASES[case])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_what_the_chart_makes_is_valid_to_the_last_key(case: str) -> None:
    for resource in resources_of("tw", CASES[case]):
        kubernetes_validate.validate(resource, KUBERNETES_VERSION, strict=True)


def test_the_package_makes_what_the_folder_makes(tmp_path: Path) -> None:
    done = helm("package", str(FOLDER), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.iterdir()
    with tarfile.open(package) as files:
        packed = {Path(name).relative_to("tilewire") for name in files.getnames()}
    assert packed == {path.relative_to(FOLDER) for path in FOLDER.rglob("*") if path.is_file()}
    assert resources_of("tw", ALL, package) == resources_of("tw", ALL)


@pytest.mark.parametrize("case", OVERLAY)
def test_it_is_the_service_that_kustomize_makes(case: str) -> None:
    ours, theirs = pod_of(resources_of("tilewire", CASES[case])), pod_of(built(OVERLAY[case]))
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
    mine = only(resources_of("tilewire", {}), "ConfigMap")["data"]
    assert mine == only(built("base"), "ConfigMap")["data"]


@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment", "NetworkPolicy", "Service"])
def test_grpc_is_added_as_by_the_component(kind: str, tmp_path: Path) -> None:
    mine = only(resources_of("tilewire", CASES["grpc"]), kind)
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
    named = set(DEFAULTS["settings"]) | {"TILEWIRE_API_KEYS_FILE", "TILEWIRE_DEVICE", "TILEWIRE_STORE"}
    assert named <= {variable_name(name) for name in Settings.model_fields}


@pytest.mark.parametrize("kind", ["PodDisruptionBudget", "NetworkPolicy", "HorizontalPodAutoscaler", "Service"])
def test_the_rest_says_what_kustomize_says(kind: str) -> None:
    mine, other = (only(resources, kind)["spec"] for resources in (resources_of("tilewire", {}), built("base")))
    for spec in (mine, other):
        for holder, key in ((spec, "selector"), (spec, "podSelector")):
            holder.pop(key, None)
    assert mine == other


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods(case: str) -> None:
    resources = resources_of("one", CASES[case])
    labels = only(resources, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [only(resources, "Deployment")["spec"]["selector"]["matchLabels"]]
    selectors.append(only(resources, "Service")["spec"]["selector"])
    selectors.append(only(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
    for selector in selectors:
        assert selector.items() <= labels.items()
    other = only(resources_of("two", CASES[case]), "Service")["spec"]["selector"]
    assert not other.items() <= labels.items(), "two releases in one namespace keep apart"


def test_every_value_has_its_effect(notes_chart: Path) -> None:
    resources = resources_of("tw", ALL)
    deployment, pod = only(resources, "Deployment"), pod_of(resources)
    assert deployment["spec"]["replicas"] == 2
    assert {one["kind"] for one in resources}.isdisjoint({"HorizontalPodAutoscaler", "NetworkPolicy"})
    container = pod["containers"][0]
    assert container["image"] == "example.org/tilewire:rocm"
    assert {one["name"]: one["value"] for one in container["env"]} == {
        "TILEWIRE_DEVICE": "cuda:0",
        "TILEWIRE_API_KEYS_FILE": "/etc/tilewire/keys.toml",
        "TILEWIRE_STORE": "/var/lib/tilewire/store",
    }
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == "keys"
    assert volumes["store"]["persistentVolumeClaim"] == {"claimName": "tw-store"}
    claim = only(resources, "PersistentVolumeClaim")["spec"]
    assert claim["storageClassName"] == "cephfs"
    assert claim["resources"] == {"requests": {"storage": "2Ti"}}
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    assert pod["nodeSelector"] == {"kubernetes.io/arch": "amd64"}
    assert [one["key"] for one in pod["tolerations"]] == ["amd.com/gpu", "own"]
    assert only(resources, "ConfigMap")["data"]["TILEWIRE_ACCESS_LOG"] == "true"
    assert only(resources, "Service")["spec"]["ports"][0]["port"] == 8080
    assert only(resources, "Service")["spec"]["ports"][1]["port"] == 9001
    assert container["ports"][1]["containerPort"] == 9001
    assert only(resources, "ConfigMap")["data"]["TILEWIRE_GRPC_PORT"] == "9001"
    notes = only(resources_of("tw", ALL, notes_chart), "Notes")["text"]
    assert "gRPC: tw.default.svc:9001" in notes
    assert "port-forward service/tw 8000:8080" in notes
    assert "gRPC" not in only(resources_of("tw", {}, notes_chart), "Notes")["text"]


def test_the_store_is_that_of_kustomize() -> None:
    resources, scale = resources_of("tilewire", CASES["store"]), built("scale")
    ours, theirs = (pod_of(one) for one in (resources, scale))
    mine, other = ours["containers"][0], theirs["containers"][0]
    pairs = [(ours["volumes"], theirs["volumes"])] + [(mine[key], other[key]) for key in ("volumeMounts", "env")]
    for own, given in pairs:
        assert {one["name"]: one for one in own} == {one["name"]: one for one in given}
    claim = only(resources, "PersistentVolumeClaim")
    assert claim["spec"] == only(scale, "PersistentVolumeClaim")["spec"]
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}, "weights outlive the release"


@pytest.mark.parametrize(
    ("case", "source"),
    [
        ("claim", {"persistentVolumeClaim": {"claimName": "weights"}}),
        ("nfs", {"nfs": {"server": "nfs.example.org", "path": "/weights"}}),
    ],
)
def test_a_store_that_there_is_needs_no_claim(case: str, source: dict[str, Any]) -> None:
    resources = resources_of("tw", CASES[case])
    assert {one["kind"] for one in resources}.isdisjoint({"PersistentVolumeClaim"})
    assert {"name": "store"} | source in pod_of(resources)["volumes"]


@pytest.mark.parametrize(
    ("drain_s", "grace_s"), [("120", 140), ("0.5", 21), ("30.0", 50), (None, 50)], ids=["more", "less", "same", "none"]
)
def test_the_grace_period_follows_the_drain(drain_s: str | None, grace_s: int) -> None:
    pod = pod_of(resources_of("tw", {"settings": {"TILEWIRE_DRAIN_TIMEOUT_S": drain_s}}))
    assert pod["terminationGracePeriodSeconds"] == grace_s


@pytest.mark.parametrize("arena", ["0", "2GiB", "64 GiB", "48GB", "34359738368", "1.5TiB"])
@pytest.mark.parametrize("device", ["cuda:0", "cuda:0,1,2"])
def test_the_grace_period_leaves_engines_time_for_their_arenas(arena: str, device: str) -> None:
    pod = pod_of(resources_of("tw", {"settings": {"TILEWIRE_ARENA_BYTES": arena, "TILEWIRE_DEVICE": device}}))
    # Zero stands for the default, whose time is within what is spare.
    arena_bytes = Settings(arena_bytes=arena).arena_bytes
    unpin_s = arena_bytes * len(devices_of(device)) // UNPINNED_BYTES_PER_S
    assert pod["terminationGracePeriodSeconds"] == 50 + unpin_s


def metrics_of(resources: list[dict[str, Any]]) -> tuple[str, str | None, dict[str, str]]:
    """Where scrapers look, the pod's port of that number that is no public one, and the settings for it."""
    template = only(resources, "Deployment")["spec"]["template"]
    named = template["metadata"]["annotations"]["prometheus.io/port"]
    ports = {str(one["containerPort"]): one["name"] for one in template["spec"]["containers"][0]["ports"]}
    data = only(resources, "ConfigMap")["data"]
    return named, ports.get(named), {name: data[name] for name in data if name.startswith("TILEWIRE_METRICS")}


@pytest.mark.parametrize(
    ("values", "port", "host"),
    [
        (CASES["metrics"], "9100", "::"),
        (CASES["keys"], "9090", "0.0.0.0"),
        ({"apiKeysSecret": "keys", "settings": {"TILEWIRE_METRICS_PORT": "9100"}}, "9100", "0.0.0.0"),
    ],
    ids=["set", "keys", "both"],
)
def test_metrics_have_a_port_that_scrapers_alone_reach(values: dict[str, Any], port: str, host: str) -> None:
    resources = resources_of("tw", values)
    settings = {"TILEWIRE_METRICS_PORT": port, "TILEWIRE_METRICS_HOST": host}
    assert metrics_of(resources) == (port, "metrics", settings)
    clients, scrapers = only(resources, "NetworkPolicy")["spec"]["ingress"]
    assert [one.keys() for one in clients["from"]] == [{"podSelector"}]
    assert "metrics" not in [one["port"] for one in clients["ports"]]
    labels = {"kubernetes.io/metadata.name": DEFAULTS["networkPolicy"]["monitoringNamespace"]}
    assert scrapers["from"] == [{"namespaceSelector": {"matchLabels": labels}}]
    assert [one["port"] for one in scrapers["ports"]] == ["metrics"]
    assert "metrics" not in [one["name"] for one in only(resources, "Service")["spec"]["ports"]]
    data = only(resources, "ConfigMap")["data"]
    assert Settings(**{name.removeprefix("TILEWIRE_").lower(): value for name, value in data.items()})


@pytest.mark.parametrize(
    "values",
    [{}, {"apiKeysSecret": "keys", "settings": {"TILEWIRE_KEYLESS": "docs, metrics"}}],
    ids=["none", "keyless"],
)
def test_metrics_stay_where_they_need_no_key(values: dict[str, Any]) -> None:
    resources = resources_of("tw", values)
    assert metrics_of(resources) == ("8000", "http", {})
    (rule,) = only(resources, "NetworkPolicy")["spec"]["ingress"]
    assert len(rule["from"]) == 2


def test_other_settings_roll_the_pods() -> None:
    def checksum(settings: dict[str, str]) -> str:
        resources = resources_of("tw", {"settings": settings})
        annotations = only(resources, "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/settings"])

    assert checksum({"TILEWIRE_ACCESS_LOG": "true"}) != checksum({"TILEWIRE_ACCESS_LOG": "false"})


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"device": "tpu"}, "device"),
        ({"settings": {"PORT": "1"}}, "settings"),
        ({"replica": 2}, "replica"),
        ({"service": {"port": 0}}, "service.port"),
        ({"service": None}, "service"),
        ({"grpc": {"port": 8000}}, "grpc.port"),
        ({"image": {"tag": ""}}, "image.tag"),
        ({"resources": None}, "resources"),
        ({"store": {"size": "much"}}, "store.size"),
        ({"store": {"nfs": {"server": "nfs.example.org", "path": "weights"}}}, "store.nfs.path"),
        ({"store": {"existingClaim": "weights", "nfs": {"server": "nfs.example.org"}}}, "store.existingClaim"),
        ({"store": {"nfs": {"server": "nfs.example.org"}}}, "set store.enabled"),
        ({"store": {"existingClaim": "weights"}}, "set store.enabled"),
        ({"settings": {"TILEWIRE_PORT": "9000"}}, "settings.TILEWIRE_PORT: pods listen on 8000"),
        ({"settings": {"TILEWIRE_HOST": "127.0.0.1"}}, "settings.TILEWIRE_HOST"),
        ({"settings": {"TILEWIRE_METRICS_HOST": "127.0.0.1"}}, "settings.TILEWIRE_METRICS_HOST"),
        ({"settings": {"TILEWIRE_METRICS_PORT": "0"}}, "settings.TILEWIRE_METRICS_PORT"),
        ({"settings": {"TILEWIRE_METRICS_PORT": "8000"}}, "8000 is a port of the pod already"),
        ({"apiKeysSecret": "keys", "grpc": {"enabled": True, "port": 9090}}, "9090 is a port of the pod already"),
        ({"settings": {"TILEWIRE_GRPC_PORT": "9001"}}, "set grpc.enabled and grpc.port"),
        ({"settings": {"TILEWIRE_DRAIN_TIMEOUT_S": "soon"}}, "settings.TILEWIRE_DRAIN_TIMEOUT_S"),
        (
            {"settings": {"TILEWIRE_TLS_CERTIFICATE": "/tls.pem"}},
            "settings.TILEWIRE_TLS_CERTIFICATE: the chart mounts no",
        ),
        ({"settings": {"TILEWIRE_API_KEYS_FILE": "/keys.toml"}}, "set apiKeysSecret instead"),
        ({"settings": {"TILEWIRE_STORE": "/store"}}, "set store.enabled instead"),
        ({"autoscaling": {"minReplicas": 9}}, "autoscaling.minReplicas: more than"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused(wrong: dict[str, Any], named: str) -> None:
    done = helm("template", "tw", str(FOLDER), values=wrong)
    assert done.returncode != 0
    assert named in done.stderr
    assert "nil pointer" not in done.stderr


def test_versions_are_those_of_the_package() -> None:
    assert yaml.safe_load((FOLDER / "Chart.yaml").read_text(encoding="utf-8"))["appVersion"] == __version__

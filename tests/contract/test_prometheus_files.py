"""`deploy/prometheus` and `deploy/grafana` as files: promtool and Grafana accept them, alerts are tested, names exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support import expressions
from tests.support.expressions import (
    DASHBOARD,
    DEPLOY,
    GPU_ONLY,
    RULES,
    alerts,
    family_of,
    names_in,
    panels,
    records,
    rules,
)
from tests.support.programs import find_program
from tilewire.service.errors import BY_CODE

ROOT = DEPLOY.parent
ALERT_TESTS = DEPLOY / "prometheus" / "tests" / "alerts_test.yml"
OPERATIONS = (ROOT / "docs" / "operations" / "monitoring.md").read_text(encoding="utf-8")
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
WIDTH = 24

every_expression = pytest.mark.parametrize(
    "expression", [*(rule["expr"] for rule in rules()), *expressions.dashboard_expressions()]
)


def promtool(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        [find_program("promtool"), *arguments], input=stdin, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_rules() -> None:
    assert promtool("check", "rules", *map(str, RULES)).count("SUCCESS") == len(RULES)


def test_promtool_accepts_the_configuration() -> None:
    shown = promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    assert f"{len(RULES)} rule files found" in shown


def test_promtool_accepts_the_configuration_for_kubernetes(tmp_path: Path) -> None:
    """Debian builds Prometheus without Kubernetes' discovery: a file's stands in for it, all else is as it is."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "kubernetes.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    (tmp_path / "targets.json").write_text("[]")
    job["file_sd_configs"] = [{"files": [str(tmp_path / "targets.json")]}]
    config["rule_files"] = [str(path) for path in RULES]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert f"{len(RULES)} rule files found" in promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_alerts_fire_and_are_silent() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(ALERT_TESTS))


def test_every_alert_has_both_tests() -> None:
    cases = [
        case for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"] for case in test.get("alert_rule_test", [])
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == alerts()
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == alerts()


def test_every_alert_has_a_severity_a_summary_and_a_remedy() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
            assert f"| `{rule['alert']}` |" in OPERATIONS, "docs/operations/monitoring.md says what to do"
    assert set(re.findall(r"^\| `(Tilewire\w+)` \|", OPERATIONS, re.MULTILINE)) == alerts()


@every_expression
def test_names_are_those_of_the_contract(expression: str) -> None:
    documented = set(re.findall(r"^\| `(tilewire_[a-z_]+)` \|", API, re.MULTILINE))
    for name in names_in(expression):
        if ":" in name:
            assert name in records()
        else:
            assert family_of(name) in documented | GPU_ONLY.keys()


@every_expression
def test_reasons_are_those_of_the_error_tree(expression: str) -> None:
    assert set(re.findall(r'reason="(\w+)"', expression)) <= BY_CODE.keys()


def test_promtool_accepts_the_exposition(client: httpx.Client) -> None:
    body = {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}
    assert client.post("/v1/matmul", json=body).status_code == 200
    text = client.get("/metrics", headers={"accept": "text/plain"}).text
    promtool("check", "metrics", stdin=text)


# ── the dashboard ─────────────────────────────────────────────────────────────────────────────────


def test_the_dashboard_has_nothing_that_grafana_does_not_know() -> None:
    """Grafana's own model of a dashboard reads it; what comes out again is all that went in."""
    register_default_plugins()
    text = DASHBOARD.read_text(encoding="utf-8")
    understood = json.loads(JSONEncoder().encode(Dashboard.from_json(json.loads(text))))
    assert lost(json.loads(text), understood) == []


def lost(given: object, understood: object, path: str = "") -> list[str]:
    """Paths of what stands in the first and not in the second."""
    if isinstance(given, dict) and isinstance(understood, dict):
        return [
            each
            for key, value in given.items()
            for each in (lost(value, understood[key], f"{path}/{key}") if key in understood else [f"{path}/{key}"])
        ]
    if isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        pairs = zip(given, understood, strict=True)
        return [each for index, (one, other) in enumerate(pairs) for each in lost(one, other, f"{path}/{index}")]
    return [] if given == understood else [path]


def test_panels_have_ids_places_and_the_provisioned_source() -> None:
    every = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= WIDTH
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells
        assert {target["datasource"]["uid"] for target in panel["targets"]} <= uids
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_provider_reads_the_folder_that_compose_mounts() -> None:
    providers = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/tilewire.yml").read_text())["providers"]
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounts = compose["services"]["grafana"]["volumes"]
    targets = {Path(mount.split(":")[1]).as_posix(): mount.split(":")[0] for mount in mounts}
    for provider in providers:
        folder = targets[provider["options"]["path"]]
        assert list((DEPLOY / folder).glob("*.json"))

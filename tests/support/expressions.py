"""Every PromQL expression that `deploy/` asks: of rules, of alerts, of the dashboard. Knows no server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "tilewire.json"

# What a server without a GPU cannot show: it has no device to ask, and compiles no kernel.
GPU_ONLY = {
    "tilewire_device_memory_bytes": {"device": "cuda:0", "state": "used"},
    "tilewire_device_power_watts": {"device": "cuda:0"},
    "tilewire_device_temperature_celsius": {"device": "cuda:0"},
    "tilewire_device_utilization_ratio": {"device": "cuda:0"},
    "tilewire_kernel_compiles_total": {"op": "matmul", "phase": "serving"},
}
# Recorded from metrics that a CPU has, for devices in the table of roofs: no CPU is.
GPU_ONLY_RECORDS = {
    "tilewire:peak_tflops",
    "tilewire:peak_bytes_per_second",
    "tilewire:roofline_share:rate2m",
}

NAME = re.compile(r"\btilewire[_:][a-z0-9_:]+")


def rules() -> list[dict[str, Any]]:
    """All rules, recording and alerting."""
    groups = [group for path in RULES for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    return [rule for group in groups for rule in group["rules"]]


def records() -> set[str]:
    """Names that recording rules make."""
    return {rule["record"] for rule in rules() if "record" in rule}


def alerts() -> set[str]:
    """Names of alerts."""
    return {rule["alert"] for rule in rules() if "alert" in rule}


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels, without the rows that divide them."""
    found = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def dashboard_expressions() -> list[str]:
    """What the dashboard asks, as it stands there."""
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def names_in(expression: str) -> set[str]:
    """Metrics and records that an expression reads."""
    return set(NAME.findall(expression))


def family_of(name: str) -> str:
    """A metric's name as docs/api.md has it: a histogram without the suffix of its series."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def needs_gpu(expression: str) -> bool:
    """Whether only a server with a GPU has data for it."""
    return bool(names_in(expression) & (GPU_ONLY.keys() | GPU_ONLY_RECORDS))

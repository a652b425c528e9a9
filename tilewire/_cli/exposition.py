"""Figures of a server from its Prometheus text: sums of counters, quantiles of histograms. Sends nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*?)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Returns the samples of an exposition by name and labels."""
    samples = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is not None:
            samples[match[1], frozenset(_LABEL.findall(match[2] or ""))] = float(match[3])
    return samples


@dataclass(frozen=True, slots=True)
class Change:
    """Two expositions of one server.

    Attributes:
        before: Samples of the earlier one.
        now: Samples of the later one.
        seconds: Time between them.
    """

    before: Samples
    now: Samples
    seconds: float

    def rate(self, name: str, **labels: str) -> float:
        """Growth of a counter per second, over all samples with these labels."""
        return self._growth(name, labels) / self.seconds if self.seconds else 0.0

    def gauge(self, name: str, **labels: str) -> float:
        """Sum of a gauge now."""
        return sum(value for key, value in self.now.items() if _is(key, name, labels))

    def quantile(self, share: float, name: str, **labels: str) -> float | None:
        """Upper bound of the bucket that holds a quantile of what was observed in between; None without one."""
        bounds: dict[float, float] = {}
        for (sample, pairs), value in self.now.items():
            if _is((sample, pairs), f"{name}_bucket", labels):
                bound = float(dict(pairs)["le"])
                bounds[bound] = bounds.get(bound, 0.0) + value - self.before.get((sample, pairs), 0.0)
        total = max(bounds.values(), default=0.0)
        if not total:
            return None
        bound = next(bound for bound in sorted(bounds) if bounds[bound] >= share * total)
        return bound if math.isfinite(bound) else None

    def label_rates(self, name: str, label: str) -> dict[str, float]:
        """Growth of a counter per second by the values of one label, without those that stood still."""
        values = {dict(pairs).get(label, "") for sample, pairs in self.now if sample == name}
        rates = {value: self.rate(name, **{label: value}) for value in sorted(values)}
        return {value: rate for value, rate in rates.items() if rate > 0}

    def _growth(self, name: str, labels: Mapping[str, str]) -> float:
        return sum(
            max(0.0, value - self.before.get(key, 0.0)) for key, value in self.now.items() if _is(key, name, labels)
        )


def _is(key: tuple[str, frozenset[tuple[str, str]]], name: str, labels: Mapping[str, str]) -> bool:
    return key[0] == name and labels.items() <= dict(key[1]).items()

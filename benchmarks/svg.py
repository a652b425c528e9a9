"""Small line and scatter plots as SVG text. Knows nothing of what it draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 760, 420, 70, 50, 40, 160
_COLOURS = ("#d1495b", "#30638e", "#4f9d69", "#8d6a9f", "#edae49", "#555555")


@dataclass(frozen=True)
class Series:
    """Points with a name; drawn as a line, or as dots when `is_scattered`."""

    name: str
    points: Sequence[tuple[float, float]]
    is_scattered: bool = False


def plot(title: str, x_label: str, y_label: str, series: Sequence[Series], *, is_log_y: bool = False) -> str:
    """An SVG document: x logarithmic, y from 0 (or logarithmic too).

    Args:
        title: above the plot.
        x_label: below it.
        y_label: beside it.
        series: what to draw; points need positive x.
        is_log_y: whether y is logarithmic.
    """
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points]
    low_x, high_x = math.log2(min(xs)), math.log2(max(xs)) + 1e-9
    low_y = math.log10(min(ys)) if is_log_y else 0.0
    high_y = math.log10(max(ys)) if is_log_y else max(ys) * 1.08

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low_x) / (high_x - low_x)
        up = ((math.log10(y) if is_log_y else y) - low_y) / (high_y - low_y)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP)

    parts = [_frame(title, x_label, y_label)]
    for power in range(math.ceil(low_x), math.floor(high_x) + 1, max(1, round((high_x - low_x) / 9))):
        x, _ = place(2.0**power, 10**low_y if is_log_y else low_y)
        parts.append(_text(x, _HEIGHT - _BOTTOM + 18, _short(2.0**power), "middle"))
    for step in range(6):
        level = low_y + (high_y - low_y) * step / 5
        value = 10**level if is_log_y else level
        _, y = place(2**low_x, value)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{value:.3g}", "end"))
    for index, one in enumerate(series):
        parts += _draw(one, [place(x, y) for x, y in one.points], _COLOURS[index % len(_COLOURS)])
        y = _TOP + 18 * index + 10
        parts.append(_text(_WIDTH - _RIGHT + 24, y, one.name, "start"))
        parts.append(
            f'<circle cx="{_WIDTH - _RIGHT + 14}" cy="{y - 4}" r="4" fill="{_COLOURS[index % len(_COLOURS)]}"/>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _draw(one: Series, placed: Sequence[tuple[float, float]], colour: str) -> list[str]:
    if one.is_scattered:
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.7"/>' for x, y in placed]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>']


def _frame(title: str, x_label: str, y_label: str) -> str:
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"',
            ' font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15">{title}</text>',
            _text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 12, x_label, "middle"),
            f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">{y_label}</text>',
        )
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def _short(value: float) -> str:
    if value < 1:
        return f"{value:.2g}"
    for suffix, size in (("M", 2**20), ("k", 2**10)):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"

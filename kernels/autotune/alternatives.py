"""Every way in which the binaries of a target can compute one shape, dispatch's own first. Pure."""

from __future__ import annotations

from tilewire.kernels.op import Config, Shape
from tilewire.kernels.runtime.targets import Target


def alternatives(shape: Shape, target: Target) -> list[Config]:
    """Every configuration of the catalogue that can compute `shape`, dispatch's own first."""
    return list(dict.fromkeys((shape.chosen(target), *shape.candidates(target))))


def chosen(shape: Shape, target: Target) -> Config:
    """What dispatch gives `shape` on `target`."""
    return shape.chosen(target)

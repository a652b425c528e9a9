"""What online tuning chooses for a shape: a race as a service runs it, on a device that has nothing else to do."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import Shape
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.learned import Learned, Product, install
from tilewire.kernels.selection.racing import GraphTimer, Racer, open_on


class Race(NamedTuple):
    """A finished race.

    Attributes:
        config: The choice after it.
        turns_ms: Milliseconds of each turn, in order.
    """

    config: Config
    turns_ms: list[float]


def race_online(shape: Shape, target: Target, device: torch.device, *, with_vendor: bool) -> Race | None:
    """Races what online tuning would for a shape that a service is asked for.

    Args:
        shape: The shape.
        target: The device.
        device: The same, for torch.
        with_vendor: Whether the vendor library takes part.

    Returns:
        The race; None for a shape of an op that is not raced.
    """
    if not isinstance(shape, MatmulShape):
        return None
    learned = Learned()
    learned.calls_of(Product(shape.problem, shape.is_plain)).count = 1
    install(target, learned)
    try:
        racer = Racer(learned, target, GraphTimer(), open_on(device), with_vendor=with_vendor)
        turns_ms = []
        stream = torch.cuda.Stream(device)
        may_go_on = True
        while may_go_on:
            began_s = time.perf_counter()
            with torch.cuda.stream(stream):
                may_go_on = racer.step()
            turns_ms.append((time.perf_counter() - began_s) * 1e3)
        return Race(shape.chosen(target), turns_ms)
    finally:
        install(target, None)

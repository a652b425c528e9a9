"""Finding the fastest of many configurations for one shape without timing all of them well. Pure but for `GpuBench`.

Everything is launched twice by itself; what is near the fastest is timed in turns, briefly; what is nearest then, at
length. So a hundred configurations take a fraction of a second, and figures that are compared closely come from the same
rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tilewire.kernels.op import Config, Shape

Times = dict[Config, float]


class Bench(Protocol):
    """Times configurations on a device, or pretends to. A configuration that fails takes `inf`."""

    def once_us(self, shape: Shape, configs: Sequence[Config]) -> list[float]:
        """Microseconds of a single call of each."""

    def in_turns_us(self, shape: Shape, configs: Sequence[Config], rounds: int) -> list[float]:
        """Median microseconds of each, interleaved over `rounds`."""


@dataclass(frozen=True)
class Rounds:
    """Limits of the two rounds of successive halving.

    Attributes:
        near: Factor on the fastest single call up to which a configuration reaches the first round.
        slack_us: Microseconds on top, for events and what else a single call is charged with.
        rounds: Turns of each configuration in the first round.
        finalists: Number that reaches the second round, beside those that must.
        final_rounds: Turns of each configuration in the second round; 0 for none.
    """

    near: float = 1.4
    slack_us: float = 1.5
    rounds: int = 3
    finalists: int = 6
    final_rounds: int = 15


def race(
    bench: Bench,
    shape: Shape,
    configs: Iterable[Config],
    *,
    must: Iterable[Config] = (),
    rounds: Rounds | None = None,
) -> Times:
    """Time `configs` on `shape`; the closer to the fastest, the better.

    Args:
        bench: Times them.
        shape: The shape.
        configs: Configurations, with or without repeats.
        must: Configurations of every round, however slow, which results are compared with.
        rounds: Limits of the rounds.

    Returns:
        Microseconds of each configuration that did not fail.
    """
    rounds = rounds or Rounds()
    must = tuple(dict.fromkeys(must))
    field = list(dict.fromkeys((*must, *configs)))
    # Twice, since a call that something interrupted would look slow and not run again.
    calls = [bench.once_us(shape, field) for _ in range(2)]
    times = dict(zip(field, map(min, *calls), strict=True))
    limit = min(times.values(), default=math.inf) * rounds.near + rounds.slack_us
    near = [config for config in field if times[config] <= limit or (config in must and math.isfinite(times[config]))]
    times |= zip(near, bench.in_turns_us(shape, near, rounds.rounds), strict=True)
    if rounds.final_rounds:
        best = sorted(near, key=times.__getitem__)[: rounds.finalists]
        final = list(dict.fromkeys((*(config for config in must if config in near), *best)))
        times |= zip(final, bench.in_turns_us(shape, final, rounds.final_rounds), strict=True)
    return {config: time_us for config, time_us in times.items() if math.isfinite(time_us)}

"""Times kernels on a GPU: interleaved, from CUDA graphs, over rotating operands.

A graph of many calls hides the host's cost of a launch, for every contestant alike, so what is measured is the device.
Contestants take turns within each round, so that clocks, heat and neighbours fall on all of them, and every round another
is first. Before the first runs one more, unmeasured: a device that is idle would wait for the host within the measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Call = Callable[[int], object]
_GRAPH_US = 400.0


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: 20th, 50th and 80th percentile over the rounds."""

    p20_us: float
    p50_us: float
    p80_us: float


def measure(
    contestants: Mapping[str, Call], num_sets: int = 1, rounds: int = 20, stream: torch.cuda.Stream | None = None
) -> dict[str, Timing]:
    """Time each contestant.

    Args:
        contestants: by name; called with the number of the operand set to use.
        num_sets: how many sets there are. Enough to outgrow L2 where operands are meant to come from memory.
        rounds: how often each contestant takes its turn.
        stream: where; a new one by default. Scratch memory stays with a stream, so who measures often reuses one.

    Returns:
        Timings by name.
    """
    stream = torch.cuda.Stream() if stream is None else stream
    stream.wait_stream(torch.cuda.current_stream())
    # Scratch memory belongs to a stream and must exist before a capture, so everything happens on one.
    with torch.cuda.stream(stream):
        runs = {name: _Run(call, num_sets) for name, call in contestants.items()}
        samples = _rounds(runs, rounds)
    return {name: _summary(values) for name, values in samples.items()}


def _rounds(runs: Mapping[str, _Run], rounds: int) -> dict[str, list[float]]:
    names = list(runs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        order = names[first:] + names[:first]
        runs[order[-1]].start()
        events = {name: runs[name].start() for name in order}
        torch.cuda.synchronize()
        for name, (begin, end) in events.items():
            samples[name].append(begin.elapsed_time(end) * 1000 / runs[name].num_calls)
    return samples


def sets_beyond_l2(bytes_of_set: int, at_most: int = 64) -> int:
    """Returns the number of operand sets that exceeds L2 three times, so that every read comes from memory."""
    l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return max(1, min(at_most, -(-3 * l2_bytes // max(1, bytes_of_set))))


class _Run:
    """One contestant as a graph of enough calls to be timed."""

    def __init__(self, call: Call, num_sets: int) -> None:
        for index in range(min(num_sets, 3)):
            call(index)
        torch.cuda.synchronize()
        probe = _capture(call, num_sets, max(num_sets, 4))
        # The first time it is sent to the device.
        _timed(probe)
        torch.cuda.synchronize()
        _timed(probe)
        begin, end = _timed(probe)
        torch.cuda.synchronize()
        each_us = max(begin.elapsed_time(end) * 1000 / max(num_sets, 4), 0.5)
        turns = max(1, round(_GRAPH_US / each_us / num_sets))
        self.num_calls = turns * num_sets
        self._graph = _capture(call, num_sets, self.num_calls)

    def start(self) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Take one turn; the events around it."""
        return _timed(self._graph)


def _capture(call: Call, num_sets: int, num_calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for index in range(num_calls):
            call(index % num_sets)
    return graph


def _timed(graph: torch.cuda.CUDAGraph) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    return begin, end


def _summary(samples: list[float]) -> Timing:
    fifths = statistics.quantiles(samples, n=5)
    return Timing(fifths[0], statistics.median(samples), fifths[3])

"""Replays launches that follow one another from a graph: one call of the driver, however many they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import torch

from tilewire.service.engine.ops.op import Compute, Operands

logger = logging.getLogger(__name__)


class Graph(Protocol):
    """A graph of launches; `torch.cuda.CUDAGraph` on a device."""

    def capture_begin(self, *, capture_error_mode: str) -> None:
        """Takes what is launched on the current stream from now on, instead of running it."""
        ...

    def capture_end(self) -> None:
        """Ends the capture."""
        ...

    def replay(self) -> None:
        """Launches all of it on the current stream."""
        ...


class Replay:
    """Launches an op, from its second call on by a graph.

    The first call loads and allocates what the op needs. Operands, results and scratch memory must have the same addresses in
    every call.
    """

    def __init__(self, compute: Compute, new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph) -> None:
        self._compute = compute
        self._new_graph = new_graph
        self._num_calls = 0
        self._graph: Graph | None = None

    def __call__(self, operands: Operands) -> None:
        """Launches on the current stream."""
        self._num_calls += 1
        if self._num_calls == 2:
            self._graph = self._captured(operands)
        if self._graph is None:
            self._compute(operands)
        else:
            self._graph.replay()

    def _captured(self, operands: Operands) -> Graph | None:
        """Returns the graph of the launches; None where they cannot be captured."""
        try:
            graph = self._new_graph()
            # Other threads copy and allocate meanwhile, on streams of their own.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._compute(operands)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            logger.warning("launches are not replayed from a graph: %s", error)
            return None
        return graph

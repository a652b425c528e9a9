"""Chooses the launch plan of a batch.

batched   equal small requests: kept memory, prepared launches, one stream
chunked   a large request, cut along rows so that copies and kernels overlap
grouped   small matrix products of unequal shapes: one grouped launch
single    everything else: copies in, kernels, copies out, on a stream each
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewire.service.engine.backends.contract import LaunchSpec
from tilewire.service.engine.backends.gpu.batched import BatchedPlans
from tilewire.service.engine.backends.gpu.chunks import Chunked, chunks_of
from tilewire.service.engine.backends.gpu.grouped import Grouped, can_group
from tilewire.service.engine.backends.gpu.launch_plan import LaunchPlan
from tilewire.service.engine.backends.gpu.pipeline import Pipeline
from tilewire.service.engine.backends.gpu.single import Single
from tilewire.service.engine.backends.gpu.staging import Staging


class LaunchPlans:
    """The launch plans of a device."""

    def __init__(self, staging: Staging, pipeline: Pipeline, *, is_invariant: bool) -> None:
        self._staging = staging
        self._is_invariant = is_invariant
        self._batched = BatchedPlans(staging, pipeline, is_invariant=is_invariant)
        self._single = Single(staging, is_invariant=is_invariant)

    def find(self, launches: Sequence[LaunchSpec]) -> LaunchPlan:
        """Returns the plan that runs a batch, whose launches are all of one op and with equal options."""
        if len(launches) > 1:
            epilogue = None if self._is_invariant else can_group(launches, self._staging)
            return self._single if epilogue is None else Grouped(epilogue, self._staging)
        (launch,) = launches
        if launch.kept is not None:
            return self._single
        if (batched := self._batched.find(launch)) is not None:
            return batched
        chunks = chunks_of(launch)
        if chunks is not None:
            return Chunked(self._staging, chunks, is_invariant=self._is_invariant)
        return self._single

    def forget(self) -> None:
        """Drops the plans that keep memory: their kernels are chosen anew."""
        self._batched.forget()

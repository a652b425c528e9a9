"""Batches of equal small requests that are like ones before: their memory is kept, and their launches are prepared.

Small requests, alone or together, cost the host more than the device: copies to be described, kernels to be chosen, arguments
to be laid out. All that depends only on types is done once. Three launches on one stream remain, and the addresses of
the slots. Runs in the engine's loop thread.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewire import kernels
from tilewire.kernels.copy.op import CopyPlan, CopyRange
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.gpu.launch_plan import PlanCache
from tilewire.service.engine.backends.gpu.pipeline import InFlight, Pipeline
from tilewire.service.engine.backends.gpu.replay import Replay
from tilewire.service.engine.backends.gpu.staging import Staging, ranges_of
from tilewire.service.engine.backends.host import TORCH_DTYPES
from tilewire.service.engine.ops.op import Compute, KernelCall, Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS

# Larger requests gain nothing: copying them takes longer than what is saved.
MAX_REQUEST_BYTES = 2**19
# Batches of one signature that can be under way at once, each with memory of its own.
MAX_CONCURRENT = 2
# Memory of all plans together, and signatures of which it may only be known that they came once.
MAX_KEPT_BYTES = 2**28
MAX_SIGNATURES = 1024
# Memory of a graph of some launches, by which the number of graphs is bounded. Assumed, not measured.
GRAPH_BYTES = 2**17
# Copies go by words of up to this.
WORD_BYTES = 8


@dataclass(eq=False, slots=True)
class Addresses:
    """Host addresses of the operands and results of a batch.

    Attributes:
        sources: Addresses of each request's operands, in order.
        outs: Addresses of each request's results, in order.
        in_bits: All of the former or'ed, modulo the largest word.
        out_bits: All of the latter or'ed, modulo the largest word.
    """

    sources: list[int]
    outs: list[int]
    in_bits: int
    out_bits: int


class Batched:
    """Memory for up to so many equal requests, and prepared launches of any number of them.

    Args:
        launch: The first launch of its signature.
        capacity: Largest number of requests; 1 for requests that run alone.
        staging: Source of memory.
        stream: Stream on which it runs; it is the current one.
        is_invariant: As `GpuBackend`'s.

    Attributes:
        is_busy: Whether a batch is on the device, and this memory with it.
        nbytes: Bytes of memory on the device.

    Raises:
        ValueError: It takes several launches.
    """

    def __init__(
        self,
        launch: LaunchSpec,
        capacity: int,
        staging: Staging,
        stream: torch.cuda.Stream,
        *,
        is_invariant: bool,
    ) -> None:
        self.is_busy = False
        self.capacity = capacity
        self._stream = stream
        self._options = launch.options
        self._op = ENGINE_OPS[launch.op.name]
        self._is_invariant = is_invariant
        self._sources = _Wholes(list(launch.concatenated.values()), launch.count, capacity, staging, self._op.pads_rows)
        self._results = _Wholes(launch.outputs, launch.count, capacity, staging, self._op.pads_rows)
        self._names = list(launch.concatenated)
        # One graph for each number of requests.
        graph_bytes = capacity * GRAPH_BYTES if self._op.takes_steps else 0
        self.nbytes = self._sources.nbytes + self._results.nbytes + graph_bytes
        self._copy_in = CopyPlan(self._sources.copies(is_gather=True), staging.device, is_gather=True)
        self._copy_out = CopyPlan(self._results.copies(is_gather=False), staging.device, is_gather=False)
        self._computes: dict[int, Compute] = {}
        self._compute_for(launch.count, launch.resident)

    def reaches(self, addresses: Addresses) -> bool:
        """Whether its copies can move from and to these addresses."""
        return not (addresses.in_bits % self._copy_in.word or addresses.out_bits % self._copy_out.word)

    def run(self, launch: LaunchSpec, addresses: Addresses, pipeline: Pipeline) -> InFlight:
        """Queues copies and the launch on one stream: what other streams would overlap is less than they cost."""
        stream, marks = self._stream, pipeline.marks()
        pipeline.use(stream)
        marks.begin.record(stream)
        self._copy_in(addresses.sources)
        marks.staged.record(stream)
        own = dict(zip(self._names, self._sources.tensors, strict=True))
        self._compute_for(launch.count, launch.resident)(Operands(own, launch.resident))
        marks.computed.record(stream)
        self._copy_out(addresses.outs)
        marks.end.record(stream)
        self.is_busy = True
        return InFlight(marks, [*launch.resident.values()], pipeline, on_end=self._free)

    def _free(self) -> None:
        self.is_busy = False

    def _compute_for(self, count: int, resident: Mapping[str, torch.Tensor]) -> Compute:
        compute = self._computes.get(count)
        if compute is None:
            own = dict(zip(self._names, self._sources.first(count), strict=True))
            outs = self._results.first(count)
            compute = self._op.prepare(
                KernelCall(kernels, Operands(own, resident), self._options, outs, self._is_invariant)
            )
            # Operands and results lie in memory of this plan, and residents are those of its signature.
            compute = self._computes[count] = Replay(compute) if self._op.takes_steps else compute
        return compute


class _Wholes:
    """Tensors on the device, each the pieces of up to `capacity` requests one after another.

    The pieces and the shape of each whole are those of a first launch, of `count` requests.
    """

    def __init__(
        self,
        joined: Sequence[tuple[Sequence[HostBytes], tuple[int, ...]]],
        count: int,
        capacity: int,
        staging: Staging,
        can_pad: bool,
    ) -> None:
        self._types = [pieces[0].type for pieces, _ in joined]
        self._pitches = [pieces[0].pitch for pieces, _ in joined]
        self._capacity = capacity
        # Of one request.
        self._rows = [shape[0] // count if shape else 1 for _, shape in joined]
        shapes = [shape if capacity == 1 else (shape[0] // count * capacity, *shape[1:]) for _, shape in joined]
        self.tensors = [
            staging.empty(shape, TORCH_DTYPES[kind.dtype], can_pad=can_pad)
            for shape, kind in zip(shapes, self._types, strict=True)
        ]
        self.nbytes = sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)

    def first(self, count: int) -> list[torch.Tensor]:
        """The tensors of so many requests."""
        if self._capacity == 1:
            return self.tensors
        return [tensor[: count * rows] for tensor, rows in zip(self.tensors, self._rows, strict=True)]

    def copies(self, *, is_gather: bool) -> list[CopyRange]:
        """Copies of each request's pieces into the wholes, or back, request by request; the addresses on the host are 0."""
        columns = []
        for whole, kind, pitch in zip(self.tensors, self._types, self._pitches, strict=True):
            places = [HostBytes(whole, kind, -whole.data_ptr(), pitch=pitch)] * self._capacity
            columns.append(ranges_of(whole, places, is_padded=not whole.is_contiguous(), is_gather=is_gather))
        return [one for of_request in zip(*columns, strict=True) for one in of_request]


@dataclass(frozen=True, slots=True)
class BoundBatch:
    """A `Batched` plan with the addresses of one launch; a `LaunchPlan`."""

    plan: Batched
    addresses: Addresses

    def run(self, launches: Sequence[LaunchSpec], pipeline: Pipeline) -> InFlight:
        """Queues copies and kernels of a batch."""
        (launch,) = launches
        return self.plan.run(launch, self.addresses, pipeline)


class BatchedPlans:
    """The `Batched` launch plans of a device."""

    def __init__(self, staging: Staging, pipeline: Pipeline, *, is_invariant: bool) -> None:
        self._staging = staging
        self._pipeline = pipeline
        # Two streams, so that two batches overlap; these have memory and scratch of their own already.
        self._streams = (pipeline.compute, pipeline.stage_in)
        self._is_invariant = is_invariant
        self._num_made = 0
        self._cache: PlanCache[Batched] = PlanCache(MAX_SIGNATURES, MAX_KEPT_BYTES)

    def find(self, launch: LaunchSpec) -> BoundBatch | None:
        """Returns a plan that can run a launch now, or None.

        The first launch of a signature gets none: most signatures that come once never come again.
        """
        signature = launch.signature
        if signature is None or not all(self._staging.can_address(places) for places, _ in _joined(launch)):
            return None
        if not self._cache.has_seen(signature):
            if not _is_worth_it(launch):
                self._cache.refuse(signature)
            return None
        plans = self._cache.find(signature)
        if plans is None:
            return None
        plan = self._free(plans, launch) or self._make(plans, launch)
        if plan is None:
            return None
        addresses = addresses_of(launch)
        return BoundBatch(plan, addresses) if plan.reaches(addresses) else None

    def forget(self) -> None:
        """Drops every plan; a batch that runs one holds it until it is over."""
        self._cache.clear()

    def _free(self, plans: Sequence[Batched], launch: LaunchSpec) -> Batched | None:
        return next((plan for plan in plans if not plan.is_busy and plan.capacity >= launch.count), None)

    def _make(self, plans: Sequence[Batched], launch: LaunchSpec) -> Batched | None:
        """Makes one more plan, in place of one that is too small."""
        count, signature = launch.count, launch.signature
        for plan in [plan for plan in plans if plan.capacity < count]:
            self._cache.remove(signature, plan)
        if len(plans) >= MAX_CONCURRENT:
            return None
        stream = self._streams[self._num_made % len(self._streams)]
        self._num_made += 1
        capacity = 1 if count == 1 else 1 << (count - 1).bit_length()
        self._pipeline.use(stream)
        try:
            plan = Batched(launch, capacity, self._staging, stream, is_invariant=self._is_invariant)
        except ValueError:
            self._cache.refuse(signature)
            return None
        self._cache.add(signature, plan)
        return plan


def _joined(launch: LaunchSpec) -> Iterator[tuple[Sequence[HostBytes], tuple[int, ...]]]:
    yield from launch.concatenated.values()
    yield from launch.outputs


def _is_worth_it(launch: LaunchSpec) -> bool:
    """Whether a request is small, has operands on the host, and none is empty or in Fortran order."""
    first = [places[0] for places, _ in _joined(launch)]
    sizes = [place.type.nbytes for place in first]
    return (
        bool(launch.concatenated)
        and all(sizes)
        and sum(sizes) <= MAX_REQUEST_BYTES
        and not any(place.fortran for place in first)
    )


def addresses_of(launch: LaunchSpec) -> Addresses:
    """Returns the addresses of a launch, request by request."""
    sources = _interleaved([sources for sources, _ in launch.concatenated.values()])
    outs = _interleaved([places for places, _ in launch.outputs])
    in_bits, out_bits = functools.reduce(operator.or_, sources, 0), functools.reduce(operator.or_, outs, 0)
    return Addresses(sources, outs, in_bits % WORD_BYTES, out_bits % WORD_BYTES)


def _interleaved(columns: Sequence[Sequence[HostBytes]]) -> list[int]:
    addresses = [_addresses(column) for column in columns]
    if len(addresses) == 1:
        return addresses[0]
    return [one for of_request in zip(*addresses, strict=True) for one in of_request]


def _addresses(places: Sequence[HostBytes]) -> list[int]:
    addresses: list[int] = []
    segment, begin = None, 0
    for place in places:
        # As in `segments_of`.
        if place.mapped is not segment:
            segment, begin = place.mapped, place.mapped.data_ptr()
        addresses.append(begin + place.offset)
    return addresses

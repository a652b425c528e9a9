"""Defines and counts the engine's metrics of launches and stages."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence

from tilewire.service.engine.backends.contract import Identity
from tilewire.service.ipc.messages import Timings
from tilewire.service.ops.op import Work
from tilewire.service.ops.registry import OPS
from tilewire.service.placement import PLACEMENTS, Placement
from tilewire.service.telemetry.counters import MetricSet, Sink
from tilewire.service.telemetry.statistics import LaunchStatistics

REQUESTS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TFLOPS_BUCKETS = tuple(0.001 * 2**step for step in range(21))
BANDWIDTH_BUCKETS = tuple(1e8 * 2**step for step in range(17))
# Operations that take as long as one byte of memory, for sharing out a program's time among its steps. Of 16-bit
# products on an H200 (790 TFLOP/s, 4.2 TB/s, `tilewire bench ops`), and of float32 ones on two server cores.
FLOPS_PER_BYTE = {"gpu": 188.0, "cpu": 16.0}


class EngineMetrics:
    """The engine's share of `/metrics`; any thread may call the sink. `restarts` is the number of engines that died before."""

    def __init__(self, sink: Sink, identity: Identity, *, version: str, restarts: int) -> None:
        self._metrics = metrics = MetricSet(sink)
        self._queue = (0, 0)
        self._flops_per_byte = FLOPS_PER_BYTE[identity.backend]
        self._stage_seconds = metrics.histogram(
            "tilewire_stage_duration_seconds", "Time that requests spent in one stage.", ("op", "stage")
        )
        self._batch_requests = metrics.histogram(
            "tilewire_batch_requests", "Requests per launch.", ("op",), REQUESTS_BUCKETS
        )
        self._tflops = metrics.histogram(
            "tilewire_kernel_tflops", "Achieved TFLOP/s of each matmul launch.", ("dtype",), TFLOPS_BUCKETS
        )
        self._bandwidth = metrics.histogram(
            "tilewire_kernel_bandwidth_bytes_per_second",
            "Achieved bytes per second of each launch of the other ops.",
            ("op",),
            BANDWIDTH_BUCKETS,
        )
        self._flops = metrics.counter("tilewire_flops_total", "Operations done.", ("op", "dtype"))
        self._kernel_seconds = metrics.counter(
            "tilewire_kernel_seconds_total", "Time that kernels ran.", ("op", "dtype")
        )
        self._kernel_bytes = metrics.counter(
            "tilewire_kernel_bytes_total",
            "Bytes that launches read and wrote, each operand counted once.",
            ("op", "dtype"),
        )
        self._compiles = metrics.counter(
            "tilewire_kernel_compiles_total", "Kernels compiled before ready and after.", ("op", "phase")
        )
        self._phase = "startup"
        self._compiling = threading.Lock()
        self._statistics = LaunchStatistics(metrics)
        self._queue_depth = metrics.gauge("tilewire_queue_depth", "Jobs that wait in the engine.")
        self._queue_bytes = metrics.gauge("tilewire_queue_bytes", "Bytes of the jobs that wait in the engine.")
        self._resident_bytes = metrics.gauge("tilewire_resident_bytes", "Bytes of resident tensors.")
        self._resident_tensors = metrics.gauge("tilewire_resident_tensors", "Resident tensors.")
        self._placed_bytes = metrics.gauge(
            "tilewire_resident_placement_bytes", "Bytes of resident tensors on each device.", ("device", "placement")
        )
        self._device = identity.device
        self._watch_metrics = MetricSet(sink)
        self._failed_looks = self._watch_metrics.counter(
            "tilewire_store_failed_looks_total", "Looks at the folder of the store that failed.", ()
        )
        self._store_loads = metrics.counter(
            "tilewire_store_loads_total", "Tensors that were loaded from the store.", ()
        )
        self._store_load_bytes = metrics.counter(
            "tilewire_store_load_bytes_total", "Bytes of the tensors that were loaded from the store.", ()
        )
        self._store_evictions = metrics.counter(
            "tilewire_store_evictions_total", "Residents that gave way to others, and that the store still has.", ()
        )
        self._begin_series(identity, version, restarts)
        metrics.flush()
        self.record_failed_looks(0)

    def _begin_series(self, identity: Identity, version: str, restarts: int) -> None:
        """Begins the series that every engine has, at 0: a rate sees the first increment."""
        stages = ("queue", "kernel") if identity.backend == "cpu" else ("queue", "h2d", "kernel", "d2h")
        self._stage_seconds.prepare(itertools.product(OPS, stages))
        self._batch_requests.prepare((op,) for op in OPS)
        self._tflops.prepare((dtype,) for dtype in OPS["matmul"].dtypes)
        self._bandwidth.prepare((op,) for op in OPS if op != "matmul")
        self._compiles.prepare(itertools.product(OPS, ("startup", "serving")))
        for gauge in (self._queue_depth, self._queue_bytes, self._resident_bytes, self._resident_tensors):
            gauge.set((), 0)
        for placement in PLACEMENTS:
            self._placed_bytes.set((self._device, placement), 0)
        for counter in (self._store_loads, self._store_load_bytes, self._store_evictions):
            counter.inc((), 0)
        restarts_total = self._metrics.counter(
            "tilewire_engine_restarts_total", "Engines that replaced a dead one.", ("device",)
        )
        # Counts of the engines before this one are still in the sum, so each one counts itself.
        restarts_total.inc((identity.device,), 1 if restarts else 0)
        build_info = self._metrics.gauge(
            "tilewire_build_info",
            "What runs; always 1.",
            ("version", "torch", "triton", "device_name", "backend"),
            merge="max",
        )
        build_info.set((version, identity.torch, identity.triton, identity.device_name, identity.backend), 1)

    def start_serving(self) -> None:
        """From now on a kernel that is compiled is one that a request waits for."""
        self._phase = "serving"

    @property
    def is_serving(self) -> bool:
        """Whether the engine has been ready."""
        return self._phase == "serving"

    def record_compile(self, op: str) -> None:
        """Counts one compiled kernel; any thread may."""
        with self._compiling:
            self._compiles.inc((op, self._phase))

    def record_queue(self, op: str, waited_ns: Sequence[int]) -> None:
        """Counts how long each job of a launch waited."""
        self._stage_seconds.observe_all((op, "queue"), [queue_ns * 1e-9 for queue_ns in waited_ns if queue_ns])

    def record_stages(self, op: str, timings: Timings, num_jobs: int) -> None:
        """Counts where the time of a launch went, for each of its jobs."""
        for stage, spent_ns in (
            ("h2d", timings.h2d_ns),
            ("kernel", timings.kernel_ns),
            ("d2h", timings.d2h_ns),
        ):
            if spent_ns:
                self._stage_seconds.observe((op, stage), spent_ns * 1e-9, num_jobs)

    def record_launch(self, op: str, program: str, batch: Sequence[Sequence[Work]], timings: Timings) -> None:
        """Counts one launch: a program's steps under their own ops, each with a share of the time as its cost is expected."""
        self._statistics.count(op, program, len(batch), timings)
        self._batch_requests.observe((op,), len(batch))
        kernel_s = timings.kernel_ns * 1e-9
        parts = joint_work(batch)
        if not parts:
            return
        costs = [part.flops / self._flops_per_byte + part.moved_bytes for part in parts]
        total = sum(costs) or 1.0
        for part, cost in zip(parts, costs, strict=True):
            labels = (part.op, part.dtype)
            self._flops.inc(labels, part.flops)
            self._kernel_seconds.inc(labels, kernel_s * cost / total if len(parts) > 1 else kernel_s)
            self._kernel_bytes.inc(labels, part.moved_bytes)
        if not kernel_s:
            return
        if op == "matmul":
            self._tflops.observe((parts[0].dtype,), parts[0].flops / kernel_s * 1e-12)
        else:
            self._bandwidth.observe((op,), sum(part.moved_bytes for part in parts) / kernel_s)

    def record_load(self, nbytes: int) -> None:
        """Counts a tensor that was loaded from the store."""
        self._store_loads.inc(())
        self._store_load_bytes.inc((), nbytes)

    def record_failed_looks(self, number: int = 1) -> None:
        """Counts looks at the store's folder that failed, and sends them; called by the one thread that looks there."""
        self._failed_looks.inc((), number)
        self._watch_metrics.flush()

    def record_eviction(self) -> None:
        """Counts a resident that gave way to others."""
        self._store_evictions.inc(())

    def flush(self) -> None:
        """Sends what was recorded; called by the thread that records."""
        depth, nbytes = self._queue
        self._queue_depth.set((), depth)
        self._queue_bytes.set((), nbytes)
        with self._compiling:
            self._metrics.flush()

    def observe_queue(self, depth: int, nbytes: int) -> None:
        """Notes the queue's gauges; any thread may."""
        self._queue = (depth, nbytes)

    def observe_residents(self, count: int, placed_bytes: Mapping[Placement, int]) -> None:
        """Sets the residents' gauges, and sends them at once: uploads are rare."""
        self._resident_tensors.set((), count)
        self._resident_bytes.set((), sum(placed_bytes.values()))
        for placement, nbytes in placed_bytes.items():
            self._placed_bytes.set((self._device, placement), nbytes)
        self.flush()


def joint_work(batch: Sequence[Sequence[Work]]) -> list[Work]:
    """Returns the work of one launch, whose jobs have the same ops and dtypes in the same order.

    Jobs that share a launch share their residents, which are read once for all of them.
    """
    return [
        parts[0]._replace(
            flops=sum([one.flops for one in parts]),
            moved_bytes=sum([one.moved_bytes for one in parts]) - (len(parts) - 1) * parts[0].shared_bytes,
        )
        for parts in zip(*batch, strict=True)
    ]

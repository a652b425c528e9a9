"""What the engine counts. Owns the metrics of launches and stages; knows no HTTP.

prometheus_client's multiprocess mode writes them to files that any gateway adds up; see `gateway.telemetry.metrics`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from tilewire.service.engine.backends.contract import Identity
from tilewire.service.ipc.messages import Template, Timings
from tilewire.service.ops.registry import OPS
from tilewire.service.telemetry.counters import SECONDS_BUCKETS, BufferedCounter, BufferedHistogram
from tilewire.service.telemetry.statistics import LaunchStatistics

REQUESTS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TFLOPS_BUCKETS = tuple(0.001 * 2**step for step in range(21))
BANDWIDTH_BUCKETS = tuple(1e8 * 2**step for step in range(17))


class EngineMetrics:
    """The engine's share of `/metrics`."""

    def __init__(self, identity: Identity, *, version: str, restarts: int) -> None:
        registry = CollectorRegistry()
        self._queue = (0, 0)
        self._stage_seconds = BufferedHistogram(
            "tilewire_stage_duration_seconds",
            "Time that requests spent in one stage.",
            ("op", "stage"),
            SECONDS_BUCKETS,
            registry,
        )
        self._batch_requests = BufferedHistogram(
            "tilewire_batch_requests", "Requests per launch.", ("op",), REQUESTS_BUCKETS, registry
        )
        self._tflops = BufferedHistogram(
            "tilewire_kernel_tflops", "Achieved TFLOP/s of each matmul launch.", ("dtype",), TFLOPS_BUCKETS, registry
        )
        self._bandwidth = BufferedHistogram(
            "tilewire_kernel_bandwidth_bytes_per_second",
            "Achieved bytes per second of each softmax and add launch.",
            ("op",),
            BANDWIDTH_BUCKETS,
            registry,
        )
        # What every engine has sooner or later begins now: the first request of its kind would wait for it.
        stages = ("queue", "kernel") if identity.backend == "cpu" else ("queue", "h2d", "kernel", "d2h")
        self._stage_seconds.prepare(itertools.product(OPS, stages))
        self._batch_requests.prepare((op,) for op in OPS)
        self._tflops.prepare((dtype,) for dtype in OPS["matmul"].dtypes)
        self._bandwidth.prepare((op,) for op in OPS if op != "matmul")
        self._flops = BufferedCounter("tilewire_flops_total", "Operations done.", ("op", "dtype"), registry)
        self._kernel_seconds = BufferedCounter(
            "tilewire_kernel_seconds_total", "Time that kernels ran.", ("op", "dtype"), registry
        )
        self._compiles = BufferedCounter(
            "tilewire_kernel_compiles_total", "Kernels compiled before ready and after.", ("op", "phase"), registry
        )
        self._phase = "startup"
        self._compiling = threading.Lock()
        self._statistics = LaunchStatistics(registry)
        self._kernel_bytes = BufferedCounter(
            "tilewire_kernel_bytes_total",
            "Bytes that launches read and wrote, each operand counted once.",
            ("op", "dtype"),
            registry,
        )
        self._queue_depth = self._gauge("tilewire_queue_depth", "Jobs that wait in the engine.", registry)
        self._queue_bytes = self._gauge("tilewire_queue_bytes", "Bytes of the jobs that wait in the engine.", registry)
        self._resident_bytes = self._gauge("tilewire_resident_bytes", "Bytes of resident tensors.", registry)
        self._resident_tensors = self._gauge("tilewire_resident_tensors", "Resident tensors.", registry)
        restarts_total = Counter(
            "tilewire_engine_restarts_total", "Engines that replaced a dead one.", ("device",), registry=registry
        )
        # The files of the engines before this one are still added up, so each one counts itself.
        restarts_total.labels(identity.device).inc(1 if restarts else 0)
        build_info = Gauge(
            "tilewire_build_info",
            "What runs; always 1.",
            ("version", "torch", "triton", "device_name", "backend"),
            multiprocess_mode="livemax",
            registry=registry,
        )
        build_info.labels(version, identity.torch, identity.triton, identity.device_name, identity.backend).set(1)

    @staticmethod
    def _gauge(name: str, text: str, registry: CollectorRegistry) -> Gauge:
        return Gauge(name, text, multiprocess_mode="livesum", registry=registry)

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

    def record_queue(self, op: str, queue_ns: int) -> None:
        """Counts how long one job waited."""
        if queue_ns:
            self._stage_seconds.observe((op, "queue"), queue_ns * 1e-9)

    def record_stages(self, op: str, timings: Timings, num_jobs: int) -> None:
        """Counts where the time of a launch went, for each of its jobs."""
        for stage, spent_ns in (
            ("h2d", timings.h2d_ns),
            ("kernel", timings.kernel_ns),
            ("d2h", timings.d2h_ns),
        ):
            if spent_ns:
                self._stage_seconds.observe((op, stage), spent_ns * 1e-9, num_jobs)

    def record_launch(self, batch: Sequence[Template], dtype: str, timings: Timings) -> None:
        """Counts one launch.

        Args:
            batch: Templates of its jobs, all of one op.
            dtype: Of their inputs.
            timings: Where the launch's time went.
        """
        op, kernel_ns = batch[0].op, timings.kernel_ns
        self._statistics.count(op, len(batch), timings)
        flops = sum(template.flops for template in batch)
        nbytes = launch_bytes(batch)
        kernel_s = kernel_ns * 1e-9
        self._batch_requests.observe((op,), len(batch))
        self._flops.inc((op, dtype), flops)
        self._kernel_seconds.inc((op, dtype), kernel_s)
        self._kernel_bytes.inc((op, dtype), nbytes)
        if not kernel_ns:
            return
        if op == "matmul":
            self._tflops.observe((dtype,), flops / kernel_s * 1e-12)
        else:
            self._bandwidth.observe((op,), nbytes / kernel_s)

    def flush(self) -> None:
        """Hands over what was recorded; called by the thread that records."""
        for buffered in (
            self._stage_seconds,
            self._batch_requests,
            self._tflops,
            self._bandwidth,
            self._flops,
            self._kernel_seconds,
            self._kernel_bytes,
            self._compiles,
        ):
            buffered.flush()
        self._statistics.flush()
        depth, nbytes = self._queue
        self._queue_depth.set(depth)
        self._queue_bytes.set(nbytes)

    def observe_queue(self, depth: int, nbytes: int) -> None:
        """Notes the queue's gauges; any thread may."""
        self._queue = (depth, nbytes)

    def observe_residents(self, count: int, nbytes: int) -> None:
        """Sets the residents' gauges."""
        self._resident_tensors.set(count)
        self._resident_bytes.set(nbytes)


def launch_bytes(batch: Sequence[Template]) -> int:
    """Bytes that one launch reads and writes.

    Jobs that share a launch share their residents, which are read once for all of them.

    Args:
        batch: Templates of its jobs.
    """
    shared = sum(one.type.nbytes for one in batch[0].inputs if one.resident is not None)
    return sum(template.moved_bytes for template in batch) - (len(batch) - 1) * shared

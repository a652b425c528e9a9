"""What the engine counts. Owns the metrics of launches and stages; knows no HTTP.

prometheus_client's multiprocess mode writes them to files that any gateway adds up; see `gateway.metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from service.counting import SECONDS_BUCKETS, BufferedCounter, BufferedHistogram
from service.engine.backends.contract import Identity
from service.messages import Job, Timings

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
        self._flops = BufferedCounter("tilewire_flops_total", "Operations done.", ("op", "dtype"), registry)
        self._kernel_seconds = BufferedCounter(
            "tilewire_kernel_seconds_total", "Time that kernels ran.", ("op", "dtype"), registry
        )
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

    def record_stages(self, op: str, timings: Timings) -> None:
        """Counts where one job's time went."""
        for stage, spent_ns in (
            ("queue", timings.queue_ns),
            ("h2d", timings.h2d_ns),
            ("kernel", timings.kernel_ns),
            ("d2h", timings.d2h_ns),
        ):
            if spent_ns:
                self._stage_seconds.observe((op, stage), spent_ns * 1e-9)

    def record_launch(self, batch: Sequence[Job], dtype: str, kernel_ns: int) -> None:
        """Counts one launch.

        Args:
            batch: Its jobs, all of one op.
            dtype: Of their inputs.
            kernel_ns: How long the kernels ran.
        """
        op = batch[0].op
        flops = sum(job.flops for job in batch)
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
        ):
            buffered.flush()
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


def launch_bytes(batch: Sequence[Job]) -> int:
    """Bytes that one launch reads and writes.

    Jobs that share a launch share their residents (see `forms.key_of`), which are read once for all of them.

    Args:
        batch: Its jobs.
    """
    shared = sum(operand.type.nbytes for operand in batch[0].operands.values() if operand.resident is not None)
    return sum(job.moved_bytes for job in batch) - (len(batch) - 1) * shared

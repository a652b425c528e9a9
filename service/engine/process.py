"""The engine process: `python -m tilewire.service.engine`, started by the supervisor. Owns its life as named phases.

`service.engine.__main__` has turned the garbage collector off, which is turned on when everything is imported.

settings → device → gateways wait → residents, kernels, checks → ready → serve → drain → exit
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import structlog
import torch
import uvloop

from tilewire._version import __version__
from tilewire.service.beside import run_beside
from tilewire.service.config.process import EngineSettings
from tilewire.service.engine.backends.contract import Backend, CannotStart, Identity, Preparation, Report
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.device_metrics.contract import NoMeter
from tilewire.service.engine.device_metrics.opening import open_meter
from tilewire.service.engine.device_metrics.sampler import Sampler
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Call
from tilewire.service.engine.loop.listener import EngineServer
from tilewire.service.engine.loop.loop import EngineLoop
from tilewire.service.engine.loop.scheduler import Caps
from tilewire.service.engine.loop.warmup import check_ops
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.ops.registry import check_registries
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.files import TensorsDirError, is_as_opened, load_file
from tilewire.service.engine.tensors.folder import StoreFolder
from tilewire.service.engine.tensors.host_mappings import HostMappings, Mappings
from tilewire.service.engine.tensors.read_through import ReadThrough
from tilewire.service.engine.tensors.resident import max_held
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import MAX_REGIONS, Regions
from tilewire.service.engine.tensors.transfers import Transfers, TransferThread
from tilewire.service.ipc.board import VersionBoard
from tilewire.service.supervisor import child
from tilewire.service.supervisor.vault import VaultFollower, VaultWriter
from tilewire.service.telemetry import log
from tilewire.service.telemetry.counters import Figures, Sink

EXIT_FAILED = 1
# A launch is predicted to take milliseconds, and the largest that fits takes seconds: one that takes this long hangs.
MAX_LAUNCH_S = 60.0
# How long a thread that waits for the interpreter leaves it to another, which may be the loop that polls. The thread that moves
# tensors waits several times for each piece: Python's 5 ms are many times what a piece takes.
SWITCH_S = 0.0005


class ThreadSafeSink:
    """The control link, for threads that are not its event loop's."""

    def __init__(self, control: child.Control) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()

    @property
    def is_congested(self) -> bool:
        """Whether figures should wait for those sent before."""
        return self._control.is_congested

    def send(self, figures: Figures) -> None:
        """Sends figures."""
        self._loop.call_soon_threadsafe(self._control.send, figures)


class ServingCompile(Exception):
    """A kernel was compiled while serving, and settings forbid that."""


def open_backend(device: str, *, batch_invariant: bool, ring: Callable[[], object]) -> Backend:
    """Chooses the backend for a device: `auto`, `cpu`, `cpu:<n>` or `cuda:<n>`.

    Args:
        device: Name of the device.
        batch_invariant: As in `Settings`.
        ring: Has the loop look whether a batch is over; for a backend that computes in a thread of its own.

    Raises:
        CannotStart: No such device.
    """
    if device.startswith("cpu") or (device == "auto" and not torch.cuda.is_available()):
        return CpuBackend("cpu" if device == "auto" else device, batch_invariant=batch_invariant, ring=ring)
    name = "cuda:0" if device == "auto" else device
    count = torch.cuda.device_count()
    if int(name.partition(":")[2]) >= count:
        raise CannotStart(f"device: {name} is not there; torch sees {count} GPU(s)")
    if find_spec("triton") is None:
        raise CannotStart(f"device: {name} needs Triton, which is not installed beside this torch")
    # Imported here and not above: a machine without a GPU need not have Triton.
    from tilewire.service.engine.backends.gpu.backend import GpuBackend  # noqa: PLC0415

    return GpuBackend(name, batch_invariant=batch_invariant)


def import_kernels(device: str) -> None:
    """Imports what the backend of a GPU needs, before it is known whether this process will serve.

    The driver is opened, which takes no memory of a device.
    """
    is_gpu = not device.startswith("cpu") and torch.cuda.is_available()
    if is_gpu and find_spec("triton") is not None:
        importlib.import_module("tilewire.service.engine.backends.gpu.backend")


def prepare(store: TensorStore, settings: EngineSettings, logger: structlog.stdlib.BoundLogger, report: Report) -> None:
    """All that comes before ready: residents, regions, kernels, and a look at what they compute.

    Raises:
        CannotStart: Why not.
    """
    metrics = store.metrics

    def on_compile(op: str) -> None:
        metrics.record_compile(op)
        if metrics.is_serving:
            logger.warning("a kernel was compiled while serving", op=op)
            if settings.forbid_serving_compiles:
                raise ServingCompile(f"a kernel of {op} was compiled while serving")

    check_registries()
    fill(store, settings, logger, report)
    how = Preparation(settings.warmup, settings.is_tuned_online, with_vendor=settings.kernels == "fastest")
    store.backend.warm_up(how, report, on_compile)
    check_ops(store.backend, report)
    store.describe_kernels()
    child.freeze_objects()


def fill(store: TensorStore, settings: EngineSettings, logger: structlog.stdlib.BoundLogger, report: Report) -> None:
    """Brings back residents, files first and then what clients changed since, and regions.

    Raises:
        TensorsDirError: A file that cannot be right, at the first start. Later the service goes on without it: what
            clients uploaded is worth more.
    """
    residents = store.residents
    leaving_out = contextlib.nullcontext if not settings.restarts else lambda: _leaving_out(logger)
    for file in settings.files:
        report("residents", len(residents), 0)
        if not is_as_opened(file):
            logger.warning(
                "a file was written over since the start: other engines may have its old content",
                setting=file.setting,
                file=file.name,
                remedy="restart the service; replace files by mv",
            )
        with leaving_out():
            load_file(residents, file, store.transfers.run)
        os.close(file.fd)
    # First what no other device has.
    own = {kept.name for kept in settings.kept.tensors if kept.info is not None and settings.index in kept.info.engines}
    for kept in sorted(settings.kept.tensors, key=lambda kept: kept.name not in own):
        report("residents", len(residents), 0)
        store.restore(kept)
    residents.versions = list(settings.kept.versions)
    if settings.restarts:
        residents.mark()
    for region in settings.kept.regions:
        store.regions.restore(region)
    store.metrics.observe_residents(len(residents), residents.placed_bytes)


@contextlib.contextmanager
def _leaving_out(logger: structlog.stdlib.BoundLogger) -> Iterator[None]:
    try:
        yield
    except TensorsDirError as error:
        logger.error("a file is left out", reason=str(error))  # noqa: TRY400  (the reason is the whole story)


def caps_of(settings: EngineSettings, identity: Identity) -> Caps:
    """The scheduler's caps, in its units."""
    # Whether torch's sums on a CPU depend on the number of rows depends on its library.
    is_alone = settings.batch_invariant and identity.backend == "cpu"
    return Caps(
        max_requests=1 if is_alone else settings.max_batch_requests,
        max_rows=settings.max_batch_rows,
        max_bytes=settings.max_batch_bytes,
        max_seconds=settings.max_batch_ms / 1e3,
        max_queue_delay_ns=int(settings.max_queue_delay_us * 1e3),
    )


def open_sampler(sink: Sink, device: str, logger: structlog.stdlib.BoundLogger) -> Sampler | None:
    """Starts the metrics of the device; without a library that reads them they are absent."""
    try:
        sampler = Sampler(sink, device, open_meter(device))
    except NoMeter as error:
        logger.info("no metrics of the device", reason=str(error))
        return None
    sampler.start()
    return sampler


def open_store(
    settings: EngineSettings, residents: Residents, metrics: EngineMetrics, mailbox: Mailbox
) -> ReadThrough | None:
    """Opens the folder of `--store`, if there is one.

    Raises:
        CannotStart: It cannot be read at the first start. Later the service goes on with what is resident.
    """
    if settings.store is None:
        return None
    folder = StoreFolder(Path(settings.store))
    if not settings.restarts:
        try:
            folder.create()
        except OSError as error:
            raise CannotStart(f"store: {settings.store}: {error.strerror}") from error
    return ReadThrough(
        residents,
        folder,
        metrics,
        lambda call: mailbox.post(Call(call)),
        check_s=settings.store_check_s,
        wait_bytes=settings.store_wait_bytes,
    )


def open_tensors(
    settings: EngineSettings,
    backend: Backend,
    metrics: EngineMetrics,
    mailbox: Mailbox,
    mappings: Mappings,
    transfers: Transfers,
) -> TensorStore:
    """Makes the engine's residents and regions; there are none yet.

    Raises:
        CannotStart: The folder of `--store` cannot be read.
    """
    vault = VaultWriter(settings.vault_fd, settings.index)
    max_copies, max_regions = max_held(MAX_REGIONS, len(settings.files))
    residents = Residents(
        backend,
        settings.resident_bytes,
        vault,
        max_copies,
        index=settings.index,
        num_engines=settings.num_engines,
        board=VersionBoard(settings.board_fd),
        has_store=settings.store is not None,
    )
    regions = Regions(
        backend,
        vault,
        mappings,
        max_bytes=settings.shared_memory_bytes,
        max_copied_bytes=settings.max_body_bytes,
        max_regions=max_regions,
        prefix=settings.shared_memory_prefix,
    )
    shared = open_store(settings, residents, metrics, mailbox)
    return TensorStore(backend, residents, regions, metrics, transfers, VaultFollower(settings.vault_fd), shared)


async def beat_when_ready(ready: asyncio.Event, control: child.Control, engine: EngineLoop, identity: Identity) -> None:
    """Sends `Ready`, and then beats for as long as the device finishes what it is given."""
    await ready.wait()
    control.send(child.Ready(f"{identity.backend}: {identity.device_name}"))

    def finishes_launches() -> bool:
        launched_ns = engine.launched_ns
        return not launched_ns or time.monotonic_ns() - launched_ns < MAX_LAUNCH_S * 1e9

    await control.beat(finishes_launches)


async def serve(settings: EngineSettings, logger: structlog.stdlib.BoundLogger) -> None:
    """Runs the engine until it is drained."""
    draining, ready = asyncio.Event(), asyncio.Event()
    control = await child.Control.open(draining.set)
    sink = ThreadSafeSink(control)
    mailbox = Mailbox()
    backend = open_backend(settings.device, batch_invariant=settings.batch_invariant, ring=mailbox.ring)
    gc.freeze()
    gc.enable()
    sys.setswitchinterval(SWITCH_S)
    metrics = EngineMetrics(sink, backend.identity, version=__version__, restarts=settings.restarts)
    mappings = HostMappings(lambda call: mailbox.post(Call(call)))
    transfers = TransferThread(backend, lambda call: mailbox.post(Call(call)), settings.host_copy_bytes_per_s)
    store = open_tensors(settings, backend, metrics, mailbox, mappings, transfers)
    engine = EngineLoop(
        settings.index,
        mailbox,
        backend,
        store,
        mappings,
        metrics,
        caps_of(settings, backend.identity),
        poll_ns=int(settings.busy_poll_s * 1e9),
    )
    transfers.is_busy = lambda: engine.launched_ns > 0
    sampler = open_sampler(sink, backend.identity.device, logger)
    server = EngineServer(socket.socket(fileno=settings.listen_fd), mailbox)
    loop = asyncio.get_running_loop()
    engine.start(lambda report: prepare(store, settings, logger, report), lambda: loop.call_soon_threadsafe(ready.set))
    background = server.accept_forever(), beat_when_ready(ready, control, engine, backend.identity)
    await run_beside(draining.wait(), background)
    if sampler is not None:
        sampler.stop()
    await asyncio.to_thread(engine.stop)
    await control.close()


def main() -> int:
    """Runs the process; returns its exit status."""
    # A terminal's Ctrl-C and a container's SIGTERM are the supervisor's to handle: it drains us last.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if len(sys.argv) > 1:
        import_kernels(sys.argv[1])
    try:
        settings = child.read_settings(EngineSettings)
    except EOFError:
        # A spare one that was not needed.
        return 0
    logger = log.configure(settings.log, process=f"engine-{settings.index}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, logger))
    except CannotStart as error:
        logger.error("the engine cannot start", reason=str(error))  # noqa: TRY400  (the reason is the whole story)
        return child.EXIT_CANNOT_START
    except Exception:
        logger.exception("the engine cannot go on")
        return EXIT_FAILED
    finally:
        logging.shutdown()
    return 0

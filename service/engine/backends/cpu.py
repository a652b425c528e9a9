"""The CPU backend: the same ops through torch on the host, straight from slot to slot.

It is a real backend, for machines that have no GPU and for tests. `/v2` and `tilewire_build_info` name it; nothing here
pretends to be Triton. Small launches run in the engine's loop thread. Threads of its own compute the others, as many at once as
the loop begins, so that it answers meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import platform
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from tilewire.service.engine.backends.chunks import Chunks, cut_of
from tilewire.service.engine.backends.contract import (
    HostBytes,
    Identity,
    LaunchFailed,
    LaunchSpec,
    Preparation,
    Report,
    Running,
    device_of,
)
from tilewire.service.engine.backends.host import TORCH_DTYPES, copy_with_one_thread, lacks_memory, tensor_of
from tilewire.service.engine.ops.op import Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.errors import TooBusy, Unavailable
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Timings
from tilewire.service.ops.op import AnyOp, AxisOp, ElementwiseOp, OpOptions

# Launches of fewer operations run on one thread: others would take as long to wake, and longer where cores are busy. A
# float32 product of 128 x 128 x 128 is 4e6 operations and takes 25 us on one thread.
SMALL_FLOPS = 10**7
# Likewise of fewer elements, on the host or resident: those of each input and result of a launch count.
SMALL_ELEMENTS = 2**18
# Ops hold several times their operands in wider numbers. Of a larger request they hold that of so many bytes at a time, which a
# core's cache has room for. Parts of 16 MiB took up to six times as long, in memory that the system had to hand out.
PART_BYTES = 2 * 2**20
# The system takes 1 ms for 8 MiB of memory that is given back to it, so larger tensors go beside the loop.
FREED_BESIDE_BYTES = 2**23


class Finished:
    """A batch that is over when `begin` returns."""

    rings = False

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def is_done(self) -> bool:
        return True

    def wait(self) -> Timings:
        return self._timings


class Computing:
    """A batch that a thread of the backend computes."""

    rings = True

    def __init__(self) -> None:
        self._over = threading.Event()
        self._timings = Timings()
        self._error: Exception | None = None

    def is_done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> Timings:
        self._over.wait()
        if self._error is not None:
            raise LaunchFailed(self._error)
        return self._timings

    def end(self, timings: Timings, error: Exception | None = None) -> None:
        """Says that it is over."""
        self._timings, self._error = timings, error
        self._over.set()


class HostCopier:
    """Copies within the host's memory."""

    def fill(self, piece: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a piece."""
        copy_with_one_thread(source, piece)

    def copy(self, piece: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a piece."""
        copy_with_one_thread(piece, into)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Turns the framework's error into the contract's, as on a GPU."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise TooBusy("no memory on the host for this request's operands and result") from error


class CpuBackend:
    """Computes with torch on the CPU; see `contract.Backend` for the calls.

    Args:
        device: Name of this engine: `cpu`, or `cpu:1` beside others.
        batch_invariant: As in `Settings`.
        ring: Called by a thread of the backend when it has computed a batch.
    """

    def __init__(
        self, device: str = "cpu", *, batch_invariant: bool = False, ring: Callable[[], object] = lambda: None
    ) -> None:
        # MKL's products sum in an order that depends on the addresses of their operands, up to multiples of 64, and on their
        # strides; the last bits of functions depend on an element's place in memory.
        self._alignment = 64 if batch_invariant else 1
        self.identity = Identity("cpu", device, _processor_name(), str(torch.__version__), "none")
        self._max_threads = torch.get_num_threads()
        self._ring = ring
        self._work: queue.SimpleQueue[tuple[Sequence[LaunchSpec], Computing]] = queue.SimpleQueue()
        self._num_threads = 0
        self._computing: list[Computing] = []
        self._freed: queue.SimpleQueue[list[torch.Tensor]] = queue.SimpleQueue()
        self._freeing: threading.Thread | None = None

    def warm_up(self, how: Preparation, report: Report, on_compile: Callable[[str], None]) -> None:
        """There is nothing to bring."""

    def kernels(self) -> dict[str, object]:
        return device_of(self.identity)

    def tune(self) -> bool:
        return False

    @property
    def num_learned(self) -> int:
        return 0

    def attach(self, segment: Segment) -> torch.Tensor:
        return torch.frombuffer(segment.view, dtype=torch.uint8)

    def detach(self, mapped: torch.Tensor) -> None:
        """Nothing was registered, so nothing is undone."""

    def adopt(self, fd: int, offset: int, nbytes: int) -> None:
        """Never: the CPU would touch the mapping, and a client that cuts its file would end this process with SIGBUS."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def reserve(self, kept: HostBytes) -> torch.Tensor:
        """The host copy itself is the resident tensor, where its address suits every kernel."""
        if (kept.mapped.data_ptr() + kept.offset) % self._alignment:
            return torch.empty(kept.type.shape, dtype=TORCH_DTYPES[kept.type.dtype])
        return tensor_of(kept, self._alignment)

    def lay_out(self, tensor: torch.Tensor, op: AnyOp, name: str, options: OpOptions) -> torch.Tensor:
        """As it lies."""
        return tensor

    def free(self, tensors: list[torch.Tensor]) -> None:
        """Leaves large ones to a thread; torch releases the interpreter's lock meanwhile."""
        if sum(tensor.nbytes for tensor in tensors) >= FREED_BESIDE_BYTES and self._can_free_beside():
            self._freed.put(tensors)
        else:
            tensors.clear()

    def _can_free_beside(self) -> bool:
        """Starts the thread when it is needed first; returns False where the system allows no more threads."""
        if self._freeing is None:
            thread = threading.Thread(target=self._free_forever, name="free", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._freeing = thread
        return True

    def _free_forever(self) -> None:
        while True:
            self._freed.get().clear()

    def open_copier(self) -> HostCopier:
        return HostCopier()

    def begin(self, launches: Sequence[LaunchSpec]) -> Running:
        """Computes small launches before it returns, and leaves others to a thread that has nothing to do."""
        if all(_is_small(launch) for launch in launches):
            return Finished(self._compute(launches))
        self._computing = [one for one in self._computing if not one.is_done()]
        if len(self._computing) == self._num_threads:
            try:
                threading.Thread(target=self._compute_forever, name="compute", daemon=True).start()
            except RuntimeError as error:
                # This request fails, and the next one tries again.
                raise Unavailable("the system allows no more threads") from error
            self._num_threads += 1
        running = Computing()
        self._computing.append(running)
        self._work.put((launches, running))
        return running

    def _compute_forever(self) -> None:
        while True:
            launches, running = self._work.get()
            try:
                running.end(self._compute(launches))
            except Exception as error:  # noqa: BLE001  (the loop gets it)
                running.end(Timings(), error)
            # The next may come late, and these hold tensors.
            del launches, running
            self._ring()

    @_memory_errors()
    def _compute(self, launches: Sequence[LaunchSpec]) -> Timings:
        began_ns = time.perf_counter_ns()
        for launch in launches:
            _use_threads(1 if launch.flops < SMALL_FLOPS else self._max_threads)
            own = {name: self._concatenate(*one) for name, one in launch.concatenated.items()}
            inputs = Operands(own, launch.resident)
            outs = [(TORCH_DTYPES[kind.dtype], shape) for kind, shape in launch.results()]
            if (chunks := self._chunks_of(launch)) is not None:
                _compute_in_chunks(launch, inputs, [dtype for dtype, _ in outs], chunks)
                continue
            results = ENGINE_OPS[launch.op.name].on_host(inputs, launch.options, outs)
            if launch.kept is not None:
                # Never the result itself: it may show an operand's slot.
                launch.kept.tensor = torch.empty(launch.kept.type.shape, dtype=outs[0][0]).copy_(results[0])
                continue
            for result, (places, _) in zip(results, launch.outputs, strict=True):
                _scatter(result, places)
        return Timings(kernel_ns=time.perf_counter_ns() - began_ns)

    def _chunks_of(self, launch: LaunchSpec) -> Chunks | None:
        """Returns how to compute a large request of rows or elements a part at a time; None for others.

        Where a row's bits must not depend on what is beside it, neither may they on where a part begins.
        """
        is_meant = isinstance(launch.op, AxisOp | ElementwiseOp) and self._alignment == 1
        cut = cut_of(launch, 2 * PART_BYTES) if is_meant else None
        if cut is None or any(places[0].pitch for places, _ in launch.outputs):
            return None
        step = max(1, cut.rows * PART_BYTES // cut.largest_bytes)
        return Chunks(cut.names, cut.rows, step, cut.is_flat) if step < cut.rows else None

    def _concatenate(self, sources: Sequence[HostBytes], shape: tuple[int, ...]) -> torch.Tensor:
        if len(sources) == 1:
            operand = tensor_of(sources[0], self._alignment)
            return operand if self._alignment == 1 else operand.contiguous()
        return torch.cat([tensor_of(source).view(-1) for source in sources]).view(shape)


def _is_small(launch: LaunchSpec) -> bool:
    """Whether a launch is over before another thread has begun with it."""
    if launch.flops >= SMALL_FLOPS:
        return False
    inputs = sum(math.prod(shape) for _, shape in launch.concatenated.values())
    inputs += sum(one.numel() for one in launch.resident.values())
    return inputs + sum(math.prod(shape) for _, shape in launch.results()) < SMALL_ELEMENTS


def _use_threads(count: int) -> None:
    """Has torch use so many threads for this one, of which each has its own number."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _compute_in_chunks(launch: LaunchSpec, inputs: Operands, dtypes: Sequence[torch.dtype], chunks: Chunks) -> None:
    """Computes a request into its slots, some rows at a time."""
    outs = [tensor_of(places[0]) for places, _ in launch.outputs]
    for span in chunks.spans():
        own = {name: chunks.rows_of(inputs[name], span) for name in chunks.names}
        results = ENGINE_OPS[launch.op.name].cpu(Operands({**inputs, **own}, {}), launch.options, dtypes)
        for result, out in zip(results, outs, strict=True):
            chunks.rows_of(out, span).copy_(result)


def _scatter(result: torch.Tensor, places: Sequence[HostBytes]) -> None:
    if len(places) == 1:
        tensor_of(places[0]).copy_(result)
        return
    pieces = result.reshape(-1).split([place.type.num_elements for place in places])
    for piece, place in zip(pieces, places, strict=True):
        tensor_of(place).copy_(piece.view(place.type.shape))


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

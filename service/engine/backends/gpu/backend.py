"""The GPU backend: Tilewire's Triton kernels on one CUDA or ROCm device, fed by DMA from and to the slots.

The launch plan of a batch decides how it runs. Every tensor of a batch is held until its last event has passed. So the
allocator cannot hand its memory on while a copy still runs. Runs in the engine's loop thread; arenas and
regions are mapped and unmapped by another.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import platform
from collections.abc import Callable, Iterator, Sequence

import torch
import triton

from tilewire.kernels.runtime.layouts import Layout, is_summed_contiguous, lay_out, preferred_layout, zeros_laid_out
from tilewire.service.engine.backends.contract import (
    PIECE_BYTES,
    DeviceLost,
    HostBytes,
    Identity,
    LaunchSpec,
    Preparation,
    Report,
)
from tilewire.service.engine.backends.gpu.kernels import DeviceKernels
from tilewire.service.engine.backends.gpu.launch_plans import LaunchPlans
from tilewire.service.engine.backends.gpu.pinning import pin, spans_of, unpin
from tilewire.service.engine.backends.gpu.pipeline import InFlight, Pipeline
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.backends.gpu.warm_pools import fill_pools, load_copies
from tilewire.service.engine.backends.host import TORCH_DTYPES, copy_with_one_thread, dtype_name
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.errors import TooBusy
from tilewire.service.ipc.arena import Segment, take_all_pages
from tilewire.service.ops.op import AnyOp, OpOptions

logger = logging.getLogger(__name__)


class GpuBackend:
    """Computes with `kernels` on one device; see `contract.Backend` for the calls.

    Args:
        device: `cuda:0`, …; ROCm devices have the same names in PyTorch.
        batch_invariant: Whether a request's result shall have the same bits whatever it was batched with.
    """

    def __init__(self, device: str, *, batch_invariant: bool = False) -> None:
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        self._pipeline = Pipeline(
            torch.cuda.Stream(self._device), torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        )
        self._staging = Staging(self._device)
        self._kernels = DeviceKernels(self._device)
        self._plans = LaunchPlans(self._staging, self._pipeline, is_invariant=batch_invariant)
        self._guard = _Guard(self._device, self._kernels)
        self._tuning: torch.cuda.Stream | None = None
        # When the last memory of a resident was free for its bytes.
        self._reserved = torch.cuda.Event()
        self.identity = Identity(
            "gpu", device, torch.cuda.get_device_name(self._device), str(torch.__version__), triton.__version__
        )

    def warm_up(self, how: Preparation, report: Report, on_compile: Callable[[str], None]) -> None:
        """Compiles, loads and tries the kernels of the device, and does what else is slow the first time."""
        self._kernels.warm_up(how, self._pipeline.compute, report, on_compile)
        with self._guard:
            load_copies(self._device, TORCH_DTYPES.values())
            fill_pools(self._device, (self._pipeline.stage_in, self._pipeline.compute))

    def kernels(self) -> dict[str, object]:
        """Every binary of the device's catalogue."""
        return self._kernels.described(self.identity)

    def tune(self) -> bool:
        """Takes a turn of a race on a stream of its own. Plans that were made with an older choice are dropped."""
        if not self._kernels.is_tuned_online:
            return False
        if self._tuning is None:
            self._tuning = torch.cuda.Stream(self._device)
        num_learned = self._kernels.num_learned
        with self._guard, torch.cuda.stream(self._tuning):
            may_go_on = self._kernels.tune()
        if self._kernels.num_learned > num_learned:
            self._plans.forget()
        return may_go_on

    @property
    def num_learned(self) -> int:
        """Number of choices that were learned since the start."""
        return self._kernels.num_learned

    def attach(self, segment: Segment) -> torch.Tensor:
        """Registers a segment with the driver, so that copies from and to it are DMA and asynchronous.

        Its pages are taken before: the driver would take them with one thread, and load no kernel meanwhile.
        """
        segment.take_all_pages()
        mapped = torch.frombuffer(segment.view, dtype=torch.uint8)
        self._register(mapped)
        return mapped

    def detach(self, mapped: torch.Tensor) -> None:
        """Unregisters a segment."""
        if self._staging.remove_mapped(mapped):
            unpin(mapped)

    def adopt(self, fd: int, offset: int, nbytes: int) -> torch.Tensor | None:
        """Maps and registers a client's memory; see `contract.Backend.adopt`.

        NVIDIA's driver pins the pages: they stay the device's even when the file is cut or removed. AMD's follows the
        page tables, as an NVIDIA device beside an Arm processor may. A file that is cut then faults on the device, so
        there the bytes are copied.
        """
        if torch.version.hip is not None or platform.machine() != "x86_64":
            return None
        try:
            mapping = mmap.mmap(fd, nbytes, offset=offset)
        except (OSError, ValueError):
            return None
        take_all_pages(mapping)
        mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        return mapped if self._register(mapped) else None

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Pinned memory from torch's pool, which waits for the copies that use it."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _register(self, mapped: torch.Tensor) -> bool:
        # The calling thread may be that of `HostMappings`, whose device would be the first one.
        torch.cuda.set_device(self._device)
        status = pin(mapped)
        if status == 0:
            self._staging.add_mapped(mapped)
            return True
        # The runtime remembers the error, and the next launch's check would report it as its own: one launch takes it away.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        logger.warning("the driver could not pin %d bytes (%s): copies will be slower", mapped.numel(), status)
        return False

    def reserve(self, kept: HostBytes) -> torch.Tensor:
        """Takes memory, laid out as suits the weight of a plain product where it may be one; `lay_out` sees what it is."""
        shape, dtype = kept.type.shape, TORCH_DTYPES[kept.type.dtype]
        with self._guard, torch.cuda.stream(self._pipeline.stage_in):
            tensor = torch.empty(0, dtype=dtype, device=self._device)
            if len(shape) < 2 or not kept.type.nbytes:
                tensor = tensor.new_empty(shape)
            else:
                tensor = zeros_laid_out(tensor, shape, preferred_layout("matmul", "b", kept.type.dtype))
            self._reserved.record()
        return tensor

    def lay_out(self, tensor: torch.Tensor, op: AnyOp, name: str, options: OpOptions) -> torch.Tensor:
        """With the summed dimension contiguous, for dtypes that matrix units take only so: copied now, not at every product."""
        summed = ENGINE_OPS[op.name].summed(name, options)
        if summed is None or not is_summed_contiguous(dtype_name(tensor.dtype), summed.precision):
            return tensor
        if tensor.dim() < 2 or not tensor.numel() or tensor.stride(summed.axis) == 1:
            return tensor
        try:
            with self._guard, torch.cuda.stream(self._pipeline.stage_in):
                laid_out = lay_out(tensor, Layout(is_k_major=summed.axis == -2))
                # Other streams read it.
                self._pipeline.stage_in.synchronize()
        except TooBusy:
            # There is no memory for a second one: it is read as it lies.
            return tensor
        return laid_out

    def free(self, tensors: list[torch.Tensor]) -> None:
        """At once: the memory stays with the allocator, and may be all that the next tensor finds."""
        tensors.clear()

    def open_copier(self) -> DeviceCopier:
        """Takes a stream and pinned memory of its own."""
        return DeviceCopier(self._device, self._reserved)

    def begin(self, launches: Sequence[LaunchSpec]) -> InFlight:
        """Queues copies and kernels of a batch; returns before they have run."""
        self._kernels.check(launches[0])
        with self._guard:
            return self._plans.find(launches).run(launches, self._pipeline)


class DeviceCopier:
    """Copies from and to one device on a stream of its own; what is not pinned goes through pinned memory.

    The thread sleeps while the device copies, and lets go of the GIL while the CPU does.

    Args:
        device: The device.
        reserved: Work that must end before a piece is filled.
    """

    def __init__(self, device: torch.device, reserved: torch.cuda.Event) -> None:
        torch.cuda.set_device(device)
        self._stream = torch.cuda.Stream(device)
        self._reserved = reserved
        self._copied = torch.cuda.Event(blocking=True)
        self._pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)

    def fill(self, piece: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a piece to the device; one of padded or turned rows is put in its place there."""
        with self._on_stream():
            self._stream.wait_event(self._reserved)
            pinned = self._pinned_for(source)
            if pinned is not source:
                copy_with_one_thread(source, pinned)
            piece.copy_(pinned, non_blocking=True)
            self._wait()

    def copy(self, piece: torch.Tensor, into: torch.Tensor) -> None:
        """Copies a piece to the host."""
        with self._on_stream():
            pinned = self._pinned_for(into)
            pinned.copy_(piece, non_blocking=True)
            self._wait()
            if pinned is not into:
                copy_with_one_thread(pinned, into)

    def _pinned_for(self, host: torch.Tensor) -> torch.Tensor:
        """Returns the tensor itself where the copy engine can take it, else memory of ours of its dtype and shape."""
        offset = int(host.storage_offset()) * host.itemsize
        if host.is_contiguous() and len(spans_of(offset, host.nbytes)) == 1 and host.is_pinned():
            return host
        return self._pinned[: host.nbytes].view(host.dtype).view(host.shape)

    def _wait(self) -> None:
        self._copied.record(self._stream)
        self._copied.synchronize()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        try:
            with torch.cuda.stream(self._stream):
                yield
        except torch.OutOfMemoryError as error:
            raise TooBusy("no memory on the device for a copy") from error
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error


class _Guard:
    """Turns the framework's exceptions into the contract's."""

    def __init__(self, device: torch.device, kernels: DeviceKernels) -> None:
        self._device = device
        self._kernels = kernels

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        try:
            # Copies that were queued before the failure still read and write slots that are about to be given back.
            torch.cuda.synchronize(self._device)
        except RuntimeError as lost:
            raise DeviceLost(str(lost)) from error
        if isinstance(error, torch.OutOfMemoryError):
            # What no request has: the memory of a race, and what the allocator keeps.
            self._kernels.give_up_race()
            torch.cuda.empty_cache()
            raise TooBusy("no memory on the device for this request's operands and result") from error

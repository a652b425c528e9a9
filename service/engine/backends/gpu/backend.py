"""The GPU backend: Tilewire's Triton kernels on one CUDA or ROCm device, fed by DMA from and to the slots.

Owns streams, staging buffers and events. A batch flows host → device on one stream, through the kernels on a second, and
back on a third, each waiting for the one before by an event, so that batches overlap. Every tensor of a batch is held until
its last event has passed, so the allocator cannot hand its memory on while a copy still runs. Equal small requests take one
stream only, see `prepared`; a large one goes through all three part by part, see `parts`. Runs in the engine's loop thread;
arenas that come during the warm-up are attached by another.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import triton

from tilewire import kernels
from tilewire.kernels.runtime.layouts import lay_out, preferred_layout
from tilewire.service.engine.backends.contract import DeviceLost, HostBytes, Identity, Joined, Preparation, Report
from tilewire.service.engine.backends.gpu.chunks import Parts, parts_of
from tilewire.service.engine.backends.gpu.grouped import Group, can_group
from tilewire.service.engine.backends.gpu.host import TORCH_DTYPES, bytes_of, shaped
from tilewire.service.engine.backends.gpu.kernels import DeviceKernels
from tilewire.service.engine.backends.gpu.prepared import Addresses, PreparedBatch, PreparedBatches
from tilewire.service.engine.backends.gpu.staging import Staging, can_pad, copy_rows, rows_of
from tilewire.service.engine.backends.gpu.warm_pools import fill_pools, load_copies
from tilewire.service.errors import TooBusy
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Timings
from tilewire.service.ops.registry import AddOptions, MatmulOptions, Options

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Marks:
    """The four moments of a batch on the device."""

    begin: torch.cuda.Event
    staged: torch.cuda.Event
    computed: torch.cuda.Event
    end: torch.cuda.Event

    @classmethod
    def new(cls) -> _Marks:
        return cls(*(torch.cuda.Event(enable_timing=True) for _ in range(4)))


_Around = tuple[torch.cuda.Event, torch.cuda.Event]


class InFlight:
    """A batch on the device.

    Args:
        marks: Its events, recorded.
        held: Every tensor that a queued copy or kernel touches.
        recycle: Takes the events back.
        launches: The events around each launch, where other things happened between them.
    """

    def __init__(
        self,
        marks: _Marks,
        held: list[torch.Tensor],
        recycle: Callable[[_Marks], None],
        launches: Sequence[_Around] = (),
    ) -> None:
        self._marks = marks
        self._held = held
        self._recycle = recycle
        self._launches = launches or ((marks.staged, marks.computed),)

    def is_done(self) -> bool:
        """Asks the device; costs a microsecond or two.

        Raises:
            DeviceLost: A copy or a kernel failed; the context is gone with it.
        """
        try:
            return bool(self._marks.end.query())
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def wait(self) -> Timings:
        """Blocks until the results are in their slots.

        Raises:
            DeviceLost: A copy or a kernel failed; the context is gone with it.
        """
        marks = self._marks
        try:
            marks.end.synchronize()
            timings = Timings(
                h2d_ns=int(marks.begin.elapsed_time(marks.staged) * 1e6),
                kernel_ns=int(sum(begin.elapsed_time(end) for begin, end in self._launches) * 1e6),
                d2h_ns=int(marks.computed.elapsed_time(marks.end) * 1e6),
            )
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error
        self._held.clear()
        self._recycle(marks)
        return timings


class GpuBackend:
    """Computes with `kernels` on one device; see `contract.Backend` for the calls.

    Args:
        device: `cuda:0`, …; ROCm devices have the same names in PyTorch.
        batch_invariant: Whether a request's result shall have the same bits whatever it was batched with.
    """

    def __init__(self, device: str, *, batch_invariant: bool = False) -> None:
        self._is_invariant = batch_invariant
        self._device = torch.device(device)
        torch.cuda.set_device(self._device)
        self._stage_in = torch.cuda.Stream(self._device)
        self._compute = torch.cuda.Stream(self._device)
        self._stage_out = torch.cuda.Stream(self._device)
        self._staging = Staging(self._device)
        # Two streams, so that two batches overlap; these have memory and scratch of their own already.
        streams = (self._compute, self._stage_in)
        self._prepared = PreparedBatches(self._staging, streams, is_invariant=batch_invariant)
        self._kernels = DeviceKernels(self._device)
        self._spare_marks: list[_Marks] = []
        self._registered: dict[int, int] = {}
        self.identity = Identity(
            "gpu", device, torch.cuda.get_device_name(self._device), str(torch.__version__), triton.__version__
        )

    def warm_up(self, how: Preparation, report: Report, on_compile: Callable[[str], None]) -> None:
        """Compiles, loads and tries the kernels of the device, and does what else is slow the first time."""
        self._kernels.warm_up(how, self._compute, report, on_compile)
        with self._guarded():
            load_copies(self._device, TORCH_DTYPES.values())
            fill_pools(self._device, (self._stage_in, self._compute))

    def kernels(self) -> dict[str, object]:
        """Every binary of the device's catalogue."""
        return self._kernels.described(self.identity)

    def attach(self, segment: Segment) -> torch.Tensor:
        """Registers a segment with the driver, so that copies from and to it are DMA and asynchronous."""
        mapped = torch.frombuffer(segment.view, dtype=torch.uint8)
        self._register(mapped)
        return mapped

    def detach(self, mapped: torch.Tensor) -> None:
        """Unregisters a segment."""
        if self._registered.pop(mapped.data_ptr(), None) is not None:
            self._staging.remove_mapped(mapped)
            torch.cuda.cudart().cudaHostUnregister(mapped.data_ptr())

    def adopt(self, fd: int, offset: int, nbytes: int) -> torch.Tensor | None:
        """Maps and registers a client's memory; see `contract.Backend.adopt`.

        NVIDIA's driver pins the pages: they stay the device's, whatever becomes of the file. AMD's follows the page tables, as
        an NVIDIA device beside an Arm processor may, and a file that is cut faults on the device: there the bytes are copied.
        """
        if torch.version.hip is not None or platform.machine() != "x86_64":
            return None
        try:
            mapping = mmap.mmap(fd, nbytes, offset=offset)
        except (OSError, ValueError):
            return None
        mapped = torch.frombuffer(mapping, dtype=torch.uint8)
        return mapped if self._register(mapped) else None

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Pinned memory from torch's pool, which knows when the copies that use it have run."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def _register(self, mapped: torch.Tensor) -> bool:
        # The calling thread may be the lobby's, whose device would be the first one.
        torch.cuda.set_device(self._device)
        status = torch.cuda.cudart().cudaHostRegister(mapped.data_ptr(), mapped.numel(), 0)
        if int(status) == 0:
            self._registered[mapped.data_ptr()] = mapped.numel()
            self._staging.add_mapped(mapped)
            return True
        # The runtime remembers the error, and the next launch's check would report it as its own: one launch takes it away.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)
        logger.warning("the driver could not pin %d bytes (%s): copies will be slower", mapped.numel(), status)
        return False

    def upload(self, source: HostBytes) -> torch.Tensor:
        """Copies a tensor to the device and waits for it."""
        with self._guarded(), torch.cuda.stream(self._stage_in):
            flat = bytes_of(source).to(self._device)
            tensor = shaped(flat, source)
            if tensor.dim() >= 2 and tensor.numel():
                # Laid out once as a weight of matmul wants to lie; other uses take any strides.
                tensor = lay_out(tensor, preferred_layout("matmul", "b", source.type.dtype))
            self._stage_in.synchronize()
        return tensor

    def download(self, tensor: torch.Tensor, into: HostBytes) -> None:
        """Copies a resident tensor to the host and waits for it."""
        with self._guarded(), torch.cuda.stream(self._stage_out):
            bytes_of(into).copy_(tensor.contiguous().view(-1).view(torch.uint8), non_blocking=True)
            self._stage_out.synchronize()

    def begin(self, launches: Sequence[Joined]) -> InFlight:
        """Queues copies and kernels of a batch; returns before they have run."""
        self._kernels.check(launches[0])
        marks = self._spare_marks.pop() if self._spare_marks else _Marks.new()
        held: list[torch.Tensor] = []
        # `set_stream` and not `stream`: that one asks for devices and streams, and takes a fifth of the time of a launch.
        with self._guarded():
            torch.cuda.set_stream(self._compute)
            prepared = self._prepared.find(launches)
            if prepared is not None:
                return self._begin_prepared(*prepared, launches[0], marks)
            parts = parts_of(launches[0]) if len(launches) == 1 else None
            if parts is not None and self._staging.can_part(launches[0], parts):
                return self._begin_in_parts(launches[0], parts, marks)
            if not self._is_invariant and can_group(launches, self._staging):
                return self._begin_group(Group(launches, self._staging), marks)
            marks.begin.record(self._stage_in)
            torch.cuda.set_stream(self._stage_in)
            staged = self._stage(launches, held)
            marks.staged.record(self._stage_in)
            self._compute.wait_event(marks.staged)
            torch.cuda.set_stream(self._compute)
            outs = [self._empty(one) for one in launches]
            _run(launches, staged, outs, is_invariant=self._is_invariant)
            marks.computed.record(self._compute)
            self._stage_out.wait_event(marks.computed)
            torch.cuda.set_stream(self._stage_out)
            self._staging.scatter([(out, one.outs) for out, one in zip(outs, launches, strict=True)], held)
            marks.end.record(self._stage_out)
        return InFlight(marks, held, self._spare_marks.append)

    def _begin_prepared(self, batch: PreparedBatch, places: Addresses, launch: Joined, marks: _Marks) -> InFlight:
        """Queues a batch of equal small requests on one stream: what other streams would overlap is less than they cost."""
        stream = batch.stream
        assert stream is not None, "This is a bug."
        torch.cuda.set_stream(stream)
        marks.begin.record(stream)
        batch.copy_in(places)
        marks.staged.record(stream)
        batch.compute(len(places.outs), launch.shared)
        marks.computed.record(stream)
        batch.copy_out(places)
        marks.end.record(stream)
        batch.is_busy = True

        def recycle(spare: _Marks) -> None:
            batch.is_busy = False
            self._spare_marks.append(spare)

        return InFlight(marks, [*launch.shared.values()], recycle)

    def _begin_group(self, group: Group, marks: _Marks) -> InFlight:
        """Queues small products of unequal shapes."""
        held: list[torch.Tensor] = []
        torch.cuda.set_stream(self._stage_in)
        marks.begin.record(self._stage_in)
        table = group.gather(held)
        marks.staged.record(self._stage_in)
        self._compute.wait_event(marks.staged)
        torch.cuda.set_stream(self._compute)
        group.compute(table)
        marks.computed.record(self._compute)
        self._stage_out.wait_event(marks.computed)
        torch.cuda.set_stream(self._stage_out)
        group.scatter(held)
        marks.end.record(self._stage_out)
        return InFlight(marks, held, self._spare_marks.append)

    def _begin_in_parts(self, launch: Joined, parts: Parts, marks: _Marks) -> InFlight:
        """Queues a large request part by part, so that copies in, kernels and copies out overlap."""
        held = [*launch.shared.values()]
        out = self._empty(launch)
        torch.cuda.set_stream(self._stage_in)
        marks.begin.record(self._stage_in)
        wholes = {
            name: self._staging.begin_whole(sources[0], held, is_parted=name in parts.names)
            for name, (sources, _) in launch.gathered.items()
        }
        held += [out, *wholes.values()]
        around: list[_Around] = []
        for span in parts.spans():
            operands = {**launch.shared, **wholes} | {name: rows_of(wholes[name], parts, span) for name in parts.names}
            rows = rows_of(out, parts, span)
            torch.cuda.set_stream(self._stage_in)
            for name in parts.names:
                copy_rows(operands[name], launch.gathered[name][0][0], parts, span, is_gather=True)
            marks.staged.record(self._stage_in)
            self._compute.wait_event(marks.staged)
            torch.cuda.set_stream(self._compute)
            launched, computed = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launched.record(self._compute)
            _run_one(launch.options, operands, rows, is_invariant=self._is_invariant)
            computed.record(self._compute)
            around.append((launched, computed))
            self._stage_out.wait_event(computed)
            torch.cuda.set_stream(self._stage_out)
            copy_rows(rows, launch.outs[0], parts, span, is_gather=False)
        marks.computed.record(self._compute)
        marks.end.record(self._stage_out)
        return InFlight(marks, held, self._spare_marks.append, around)

    def _stage(self, launches: Sequence[Joined], held: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        operands = [operand for one in launches for operand in one.gathered.values()]
        wholes = iter(self._staging.gather(operands, held, can_pad=can_pad(launches[0])) if operands else ())
        staged = []
        for one in launches:
            held += one.shared.values()
            staged.append({**one.shared, **{name: next(wholes) for name in one.gathered}})
        return staged

    def _empty(self, launch: Joined) -> torch.Tensor:
        dtype = TORCH_DTYPES[launch.outs[0].type.dtype]
        return self._staging.empty(launch.out_shape, dtype, can_pad=can_pad(launch))

    def _guarded(self) -> _Guard:
        return _Guard(self)

    def drain(self) -> None:
        """Waits until nothing runs; after a failure, before memory may be reused."""
        torch.cuda.synchronize(self._device)


class _Guard:
    """Turns the framework's exceptions into the contract's."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        try:
            # Copies that were queued before the failure still read and write slots that are about to be given back.
            self._backend.drain()
        except RuntimeError as lost:
            raise DeviceLost(str(lost)) from error
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
            raise TooBusy("no memory on the device for this request's operands and result") from error


def _run(
    launches: Sequence[Joined],
    staged: Sequence[Mapping[str, torch.Tensor]],
    outs: Sequence[torch.Tensor],
    *,
    is_invariant: bool,
) -> None:
    """Launches the kernels of a batch on the current stream; several small products share one launch."""
    options = launches[0].options
    if len(launches) == 1 or is_invariant:
        # What sums differently than a launch of its own is not for those who want the same bits.
        for operands, out in zip(staged, outs, strict=True):
            _run_one(options, operands, out, is_invariant=is_invariant)
        return
    assert isinstance(options, MatmulOptions), "This is a bug."
    kernels.grouped_matmul(
        [one["a"].mT.contiguous() if options.transpose_a else one["a"] for one in staged],
        [one["b"].mT if options.transpose_b else one["b"] for one in staged],
        activation=options.activation,
        out_dtype=outs[0].dtype,
        precision=options.precision,
        out=outs,
    )


def _run_one(options: Options, inputs: Mapping[str, torch.Tensor], out: torch.Tensor, *, is_invariant: bool) -> None:
    if isinstance(options, MatmulOptions):
        kernels.matmul(
            inputs["a"],
            inputs["b"],
            bias=inputs.get("bias"),
            a_scale=inputs.get("a_scale"),
            b_scale=inputs.get("b_scale"),
            transpose_a=options.transpose_a,
            transpose_b=options.transpose_b,
            activation=options.activation,
            out_dtype=out.dtype,
            precision=options.precision,
            batch_invariant=is_invariant,
            out=out,
        )
    elif isinstance(options, AddOptions):
        kernels.add(inputs["a"], inputs["b"], alpha=options.alpha, out_dtype=out.dtype, out=out)
    else:
        axis, log = options.axis, options.log
        kernels.softmax(inputs["x"], axis=axis, log=log, out_dtype=out.dtype, batch_invariant=is_invariant, out=out)

"""The CPU backend: the same ops through torch on the host, straight from slot to slot.

Owns how each op is computed without a GPU. It is a real backend, for machines that have no GPU and for tests, and says so in
`/v2` and `tilewire_build_info`; nothing here pretends to be Triton. Runs in the engine's loop thread.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from tilewire.service.engine.backends.contract import HostBytes, Identity, Joined, Preparation, Report, device_of
from tilewire.service.engine.backends.gpu.host import TORCH_DTYPES, tensor_of
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Timings
from tilewire.service.ops.registry import AddOptions, MatmulOptions, SoftmaxOptions

ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.01),
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class Finished:
    """A batch that is over when `begin` returns: the CPU does not run ahead."""

    def __init__(self, timings: Timings) -> None:
        self._timings = timings

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> Timings:
        """Returns at once."""
        return self._timings


class CpuBackend:
    """Computes with torch on the CPU; see `contract.Backend` for the calls.

    Args:
        device: What this engine is called: `cpu`, or `cpu:1` beside others.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.identity = Identity("cpu", device, _processor_name(), str(torch.__version__), "none")

    def warm_up(self, how: Preparation, report: Report, on_compile: Callable[[str], None]) -> None:
        """There is nothing to bring."""

    def kernels(self) -> dict[str, object]:
        """None: torch computes."""
        return device_of(self.identity)

    def attach(self, segment: Segment) -> torch.Tensor:
        """Maps a segment as a flat uint8 tensor."""
        return torch.frombuffer(segment.view, dtype=torch.uint8)

    def detach(self, mapped: torch.Tensor) -> None:
        """Nothing was registered, so nothing is undone."""

    def adopt(self, fd: int, offset: int, nbytes: int) -> None:
        """Never: the CPU would touch the mapping, and a client that cuts its file would end this process with SIGBUS."""

    def host_buffer(self, nbytes: int) -> torch.Tensor:
        """Ordinary memory."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, source: HostBytes) -> torch.Tensor:
        """The host copy itself is the resident tensor."""
        return tensor_of(source)

    def download(self, tensor: torch.Tensor, into: HostBytes) -> None:
        """Copies within the host's memory."""
        tensor_of(into).copy_(tensor)

    def begin(self, launches: Sequence[Joined]) -> Finished:
        """Computes every launch before it returns."""
        began_ns = time.perf_counter_ns()
        for launch in launches:
            inputs = dict(launch.shared)
            inputs |= {name: _gather(sources, shape) for name, (sources, shape) in launch.gathered.items()}
            _scatter(compute(launch.options, inputs, TORCH_DTYPES[launch.outs[0].type.dtype]), launch.outs)
        return Finished(Timings(kernel_ns=time.perf_counter_ns() - began_ns))


def _gather(sources: Sequence[HostBytes], shape: tuple[int, ...]) -> torch.Tensor:
    if len(sources) == 1:
        return tensor_of(sources[0])
    return torch.cat([tensor_of(source).view(-1) for source in sources]).view(shape)


def _scatter(result: torch.Tensor, outs: Sequence[HostBytes]) -> None:
    pieces = result.reshape(-1).split([out.type.num_elements for out in outs])
    for piece, out in zip(pieces, outs, strict=True):
        tensor_of(out).copy_(piece.view(out.type.shape))


def compute(
    options: MatmulOptions | SoftmaxOptions | AddOptions, inputs: Mapping[str, torch.Tensor], out_dtype: torch.dtype
) -> torch.Tensor:
    """Runs one op on CPU tensors.

    Args:
        options: The op's options; their class says which op.
        inputs: Tensors by input name, as `ops` allows them.
        out_dtype: Of the result.

    Returns:
        The result, in `out_dtype` or in a dtype that converts to it without further rounding.
    """
    if isinstance(options, MatmulOptions):
        return _matmul(inputs, options, out_dtype)
    if isinstance(options, SoftmaxOptions):
        run = torch.log_softmax if options.log else torch.softmax
        return run(inputs["x"], options.axis, dtype=torch.float32)
    return _add(inputs["a"], inputs["b"], options, out_dtype)


def _matmul(inputs: Mapping[str, torch.Tensor], options: MatmulOptions, out_dtype: torch.dtype) -> torch.Tensor:
    a, b = inputs["a"], inputs["b"]
    # int8 products are exact in float64, whose matmul is fast; torch's own integer matmul is a plain loop.
    wide = torch.float64 if a.dtype == torch.int8 else torch.float32
    acc = torch.matmul(
        (a.mT if options.transpose_a else a).to(wide),
        (b.mT if options.transpose_b else b).to(wide),
    )
    if out_dtype == torch.int32:
        acc = acc.to(torch.int32)
    elif wide == torch.float64:
        acc = acc.to(torch.float32)
    if (a_scale := inputs.get("a_scale")) is not None:
        acc = acc * a_scale.reshape(-1, 1)
    if (b_scale := inputs.get("b_scale")) is not None:
        acc = acc * b_scale.reshape(1, -1)
    if (bias := inputs.get("bias")) is not None:
        acc = acc + bias.to(acc.dtype)
    return ACTIVATIONS[options.activation](acc)


def _add(a: torch.Tensor, b: torch.Tensor, options: AddOptions, out_dtype: torch.dtype) -> torch.Tensor:
    if a.dtype.is_floating_point:
        wide = torch.promote_types(torch.promote_types(a.dtype, out_dtype), torch.float32)
        return torch.add(a.to(wide), b.to(wide), alpha=options.alpha)
    # Integers wrap as NumPy's do, whatever alpha is.
    alpha = torch.tensor(options.alpha, dtype=torch.int64).to(a.dtype)
    return a + b * alpha


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

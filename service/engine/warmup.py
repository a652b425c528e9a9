"""What must hold before an engine says that it is ready: every op, run on this device, gives a known answer.

Owns the check; knows neither clients nor the scheduler. Runs in the main thread before the loop starts.
"""

from __future__ import annotations

import torch

from service.arena import Segment
from service.engine.backends.contract import Backend, HostBytes, Step
from service.engine.backends.host import tensor_of
from service.engine.forms import join
from service.ops import OPS, AddOptions, Limits, MatmulOptions, Options, SoftmaxOptions, TensorType, plan


class WarmupError(Exception):
    """An op gave a wrong answer on this device: it must not serve."""


def warm_up(backend: Backend) -> None:
    """Runs each op once, from slot to slot, and compares with an answer worked out by hand.

    Raises:
        WarmupError: An answer is wrong.
    """
    segment = Segment.create("tilewire-warmup", 2**16)
    mapped = backend.attach(segment)
    cases: list[tuple[str, Options, dict[str, list[list[float]]], list[list[float]]]] = [
        ("matmul", MatmulOptions(), {"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}, [[19, 22], [43, 50]]),
        ("softmax", SoftmaxOptions(), {"x": [[0, 0], [5, 5]]}, [[0.5, 0.5], [0.5, 0.5]]),
        ("add", AddOptions(alpha=2), {"a": [[1, 2]], "b": [[10, 20]]}, [[21, 42]]),
    ]
    for op, options, inputs, expected in cases:
        result = _run(backend, mapped, (op, options), {name: torch.tensor(rows) for name, rows in inputs.items()})
        if not torch.equal(result, torch.tensor(expected, dtype=torch.float32)):
            raise WarmupError(f"{op} gave {result.tolist()} for {inputs}, not {expected}")
    backend.detach(mapped)
    del mapped, result
    segment.close()


def _run(
    backend: Backend, mapped: torch.Tensor, call: tuple[str, Options], inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    op, options = call
    placed: dict[str, HostBytes | torch.Tensor] = {}
    types = {name: TensorType("float32", tuple(values.shape)) for name, values in inputs.items()}
    for number, (name, values) in enumerate(inputs.items()):
        source = HostBytes(mapped, types[name], 4096 * (number + 1))
        tensor_of(source).copy_(values)
        placed[name] = source
    out = HostBytes(mapped, plan(OPS[op], types, options, Limits()).out, 0)
    tensor_of(out).fill_(float("nan"))
    backend.begin(join([Step(op, options, placed, out)], None)).wait()
    return tensor_of(out).clone()

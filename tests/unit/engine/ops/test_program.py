"""Programs on the CPU backend: equal to the same steps one after the other, alone and in a batch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.jobs import JobBench
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import join
from tilewire.service.engine.loop.jobs import BoundJob
from tilewire.service.engine.loop.resolve import bind, plan_of
from tilewire.service.ipc.messages import InputSpec, Job, OutputSpec, Stale, Template
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.program.op import PROGRAM, ProgramOptions
from tilewire.service.ops.registry import OPS

W1, B1, W2 = torch.randn(8, 16), torch.randn(16), torch.randn(16, 4)
STEPS = [
    {
        "op": "matmul",
        "inputs": {"a": "x", "b": "@w1", "bias": "@b1"},
        "options": {"activation": "relu"},
        "as": "h",
    },
    {"op": "matmul", "inputs": {"a": "h", "b": "@w2"}, "as": "y"},
    {"op": "softmax", "inputs": {"x": "y"}, "as": "p"},
]


@pytest.fixture
def bench() -> Iterator[JobBench]:
    bench = JobBench()
    yield bench
    bench.close()


def options_of(steps: list[dict[str, Any]], *outputs: str) -> ProgramOptions:
    raw = {"inputs": {"x": {"dtype": "float32", "shape": [-1, 8]}}, "steps": steps, "outputs": list(outputs)}
    return ProgramOptions(parse_program(json.dumps(raw), OPS).text)


def job(bench: JobBench, x: torch.Tensor, options: ProgramOptions) -> BoundJob:
    inputs: dict[str, HostBytes | torch.Tensor] = {"x": bench.put(x), "@w1": W1, "@b1": B1, "@w2": W2}
    return bench.job(PROGRAM, options, **inputs)


def expected(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.relu(x @ W1 + B1)
    return h, torch.softmax(h @ W2, -1)


def test_the_outputs_are_those_of_the_steps(bench: JobBench) -> None:
    x = torch.randn(5, 8)
    one = job(bench, x, options_of(STEPS, "p", "h"))
    bench.backend.begin(join([one])).wait()
    h, p = expected(x)
    torch.testing.assert_close(tensor_of(one.outs[0]), p)
    torch.testing.assert_close(tensor_of(one.outs[1]), h)


def test_a_value_lies_as_in_a_request_of_its_own(bench: JobBench) -> None:
    """Sums depend on strides, and the elements chosen of each row lie apart."""
    steps: list[dict[str, Any]] = [
        {"op": "topk", "inputs": {"x": "x"}, "options": {"k": 1}, "as": ["top", "at"]},
        {"op": "reduce", "inputs": {"x": "top"}, "options": {"kind": "sum", "axis": 0}, "as": "total"},
    ]
    x = torch.randn(5000, 8, generator=torch.Generator().manual_seed(1))
    one = bench.job(PROGRAM, options_of(steps, "total"), x=bench.put(x))
    bench.backend.begin(join([one])).wait()
    assert torch.equal(tensor_of(one.outs[0]), x.amax(-1, keepdim=True).sum(0))


def test_requests_share_a_launch_by_rows(bench: JobBench) -> None:
    options = options_of(STEPS, "p", "h")
    inputs = [torch.randn(rows, 8) for rows in (1, 5, 2)]
    jobs = [job(bench, x, options) for x in inputs]
    assert len({one.key for one in jobs} | {None}) == 2
    launches = join(jobs)
    assert len(launches) == 1
    bench.backend.begin(launches).wait()
    for one, x in zip(jobs, inputs, strict=True):
        h, p = expected(x)
        torch.testing.assert_close(tensor_of(one.outs[0]), p)
        torch.testing.assert_close(tensor_of(one.outs[1]), h)


def test_a_value_is_kept_until_its_last_reader(bench: JobBench) -> None:
    steps = [
        {"op": "softmax", "inputs": {"x": "x"}, "as": "a"},
        {"op": "softmax", "inputs": {"x": "a"}, "as": "b"},
        {"op": "add", "inputs": {"a": "a", "b": "b"}, "as": "c"},
        {"op": "add", "inputs": {"a": "c", "b": "x"}, "options": {"alpha": -2}, "as": "d"},
    ]
    x = torch.randn(3, 8)
    one = bench.job(PROGRAM, options_of(steps, "d"), x=bench.put(x))
    bench.backend.begin(join([one])).wait()
    a = torch.softmax(x, -1)
    torch.testing.assert_close(tensor_of(one.outs[0]), a + torch.softmax(a, -1) - 2 * x)


def test_a_program_that_was_replaced_is_not_run(bench: JobBench) -> None:
    options = options_of([{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}], "p")
    text = torch.frombuffer(bytearray(options.text.encode()), dtype=torch.int8)
    name = bench.resident(text)
    version = bench.residents.get(name, field="program").info.version
    x = bench.put(torch.randn(2, 8))

    def run(version: int | None) -> BoundJob | Stale:
        inputs = (
            InputSpec("x", x.type),
            InputSpec("program", TensorType("int8", (len(text),)), resident=name, version=version),
        )
        template = Template(7, PROGRAM, inputs, options, (OutputSpec(x.type),), 1, 1)
        out = bench.place(x.type)
        plan = plan_of(template, "cpu")
        return bind(Job(7, 7, (x.offset, out.offset)), plan, bench.client, bench.bindings, bench.regions, 0)

    assert isinstance(run(version), BoundJob)
    assert isinstance(run(None), BoundJob)
    stale = run(version - 1)
    assert isinstance(stale, Stale)
    assert [one.version for one in stale.tensors] == [version]

"""Which jobs share a launch, and that a shared launch gives each the result that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tilewire.service.engine.backends.contract import HostBytes, Step
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import join, key_of
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import Job, Operand
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import Limits, TensorType
from tilewire.service.ops.registry import OPS, Options, plan
from tilewire.service.ops.softmax import SoftmaxOptions

SEGMENT_BYTES = 2**20


class Bench:
    """Steps over one segment, as the loop would make them."""

    def __init__(self) -> None:
        self.backend = CpuBackend()
        self.mapped = self.backend.attach(Segment.create("test", SEGMENT_BYTES))
        self.end = 0
        self.generator = torch.Generator().manual_seed(0)

    def place(self, kind: TensorType, fortran: bool = False) -> HostBytes:
        host = HostBytes(self.mapped, kind, self.end, fortran)
        self.end += -(-kind.nbytes // 256) * 256
        return host

    def random(self, shape: Sequence[int], dtype: str = "float32", fortran: bool = False) -> HostBytes:
        host = self.place(TensorType(dtype, tuple(shape)), fortran)
        values = torch.randint(-9, 9, tuple(shape), generator=self.generator)
        tensor_of(host).copy_(values)
        return host

    def step(self, op: str, options: Options, **inputs: HostBytes | torch.Tensor) -> tuple[object, Step]:
        types = {
            name: source.type
            if isinstance(source, HostBytes)
            else TensorType(str(source.dtype).removeprefix("torch."), tuple(source.shape))
            for name, source in inputs.items()
        }
        planned = plan(OPS[op], types, options, Limits())
        job = Job(
            id=1,
            op=op,
            operands={name: Operand(kind) for name, kind in types.items()},
            options=options,
            out=planned.out,
            out_offset=0,
            flops=planned.flops,
            moved_bytes=planned.moved_bytes,
        )
        return key_of(job, inputs), Step(op, options, inputs, self.place(planned.out))

    def run(self, steps: list[Step], key: object) -> list[torch.Tensor]:
        for step in steps:
            if step.out.type.num_elements:
                tensor_of(step.out).fill_(99)
        launches = join(steps, key)
        self.backend.begin(launches).wait()
        return [tensor_of(step.out).clone() for step in steps]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def assert_same_together_and_alone(bench: Bench, made: list[tuple[object, Step]], num_launches: int) -> None:
    keys = {key for key, _ in made}
    assert len(keys) == 1
    key = keys.pop()
    assert key is not None
    steps = [step for _, step in made]
    assert len(join(steps, key)) == num_launches
    together = bench.run(steps, key)
    alone = [bench.run([step], None)[0] for step in steps]
    for one, other in zip(together, alone, strict=True):
        # Small integers in float32: exact in any order of summation.
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_products_with_one_resident_weight_become_one_taller_product(bench: Bench) -> None:
    weight, bias = torch.randint(-5, 5, (24, 7)).float(), torch.arange(7.0)
    options = MatmulOptions(activation="relu")
    shapes = [(1, 24), (5, 24), (2, 3, 24), (16, 24)]
    made = [bench.step("matmul", options, a=bench.random(shape), b=weight, bias=bias) for shape in shapes]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_a_transposed_resident_weight_is_shared_too(bench: Bench) -> None:
    weight = torch.randint(-5, 5, (7, 24)).float()
    made = [
        bench.step("matmul", MatmulOptions(transpose_b=True), a=bench.random((rows, 24)), b=weight) for rows in (3, 1)
    ]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_softmax_rows_of_equal_length_concatenate_whatever_the_rank(bench: Bench) -> None:
    made = [
        bench.step("softmax", SoftmaxOptions(axis=axis), x=bench.random(shape))
        for shape, axis in (((33,), 0), ((4, 33), 1), ((2, 3, 33), -1))
    ]
    assert len({key for key, _ in made}) == 1
    steps = [step for _, step in made]
    together = bench.run(steps, made[0][0])
    for one, step in zip(together, steps, strict=True):
        torch.testing.assert_close(one, bench.run([step], None)[0])


def test_sums_concatenate_flat(bench: Bench) -> None:
    made = [
        bench.step("add", AddOptions(alpha=3), a=bench.random(shape, "int32"), b=bench.random(shape, "int32"))
        for shape in ((5,), (2, 3), (), (4, 1, 7))
    ]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_small_products_of_equal_shape_stack(bench: Bench) -> None:
    made = [bench.step("matmul", MatmulOptions(), a=bench.random((3, 5)), b=bench.random((5, 4))) for _ in range(4)]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_small_products_of_unequal_shape_share_a_batch(bench: Bench) -> None:
    made = [
        bench.step("matmul", MatmulOptions(), a=bench.random((m, 5)), b=bench.random((5, n)))
        for m, n in ((3, 4), (2, 9))
    ]
    assert_same_together_and_alone(bench, made, num_launches=2)


def test_different_weights_options_dtypes_and_widths_never_share(bench: Bench) -> None:
    one, other = torch.ones(8, 4), torch.ones(8, 4)
    keys = [
        bench.step("matmul", MatmulOptions(), a=bench.random((2, 8)), b=one)[0],
        bench.step("matmul", MatmulOptions(), a=bench.random((2, 8)), b=other)[0],
        bench.step("matmul", MatmulOptions(activation="relu"), a=bench.random((2, 8)), b=one)[0],
        bench.step("matmul", MatmulOptions(out_dtype="float16"), a=bench.random((2, 8)), b=one)[0],
        bench.step("matmul", MatmulOptions(), a=bench.random((2, 8)), b=one, bias=torch.ones(4))[0],
        bench.step("softmax", SoftmaxOptions(), x=bench.random((2, 8)))[0],
        bench.step("softmax", SoftmaxOptions(log=True), x=bench.random((2, 8)))[0],
        bench.step("softmax", SoftmaxOptions(), x=bench.random((2, 9)))[0],
        bench.step("add", AddOptions(), a=bench.random((2,)), b=bench.random((2,)))[0],
        bench.step("add", AddOptions(alpha=1.0), a=bench.random((2,)), b=bench.random((2,)))[0],
        bench.step("add", AddOptions(), a=bench.random((2,), "int32"), b=bench.random((2,), "int32"))[0],
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_joined_runs_alone(bench: Bench) -> None:
    weight = torch.ones(8, 4)
    alone = [
        bench.step("matmul", MatmulOptions(transpose_a=True), a=bench.random((8, 2)), b=weight),
        bench.step("matmul", MatmulOptions(), a=bench.random((2, 8), fortran=True), b=weight),
        bench.step("matmul", MatmulOptions(), a=bench.random((2, 8)), b=weight, bias=bench.random((4,))),
        bench.step("matmul", MatmulOptions(), a=bench.random((0, 8)), b=weight),
        bench.step("softmax", SoftmaxOptions(axis=0), x=bench.random((2, 8))),
        bench.step("add", AddOptions(), a=bench.random((2, 8)), b=bench.random((8,))),
        bench.step("add", AddOptions(), a=bench.random((2, 8)), b=torch.ones(2, 8)),
    ]
    assert [key for key, _ in alone] == [None] * len(alone)

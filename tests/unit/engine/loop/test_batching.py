"""Which jobs share a launch, and that a shared launch gives each the result that it gets alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.support.jobs import JobBench
from tilewire.service.engine.backends.contract import HostBytes
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import join
from tilewire.service.engine.loop.jobs import BoundJob
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions

SEGMENT_BYTES = 2**20


class Bench(JobBench):
    """Jobs over one segment, as the loop would make them."""

    def __init__(self) -> None:
        super().__init__(SEGMENT_BYTES)
        self.generator = torch.Generator().manual_seed(0)

    def random(self, shape: Sequence[int], dtype: str = "float32", fortran: bool = False) -> HostBytes:
        host = self.place(TensorType(dtype, tuple(shape)), fortran=fortran)
        tensor_of(host).copy_(torch.randint(-9, 9, tuple(shape), generator=self.generator))
        return host

    def run(self, jobs: list[BoundJob]) -> list[torch.Tensor]:
        for job in jobs:
            for out in job.outs:
                tensor_of(out).fill_(99)
        self.backend.begin(join(jobs)).wait()
        return [tensor_of(job.outs[0]).clone() for job in jobs]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def assert_same_together_and_alone(bench: Bench, jobs: list[BoundJob], num_launches: int) -> None:
    keys = {job.key for job in jobs}
    assert len(keys) == 1
    assert None not in keys
    assert len(join(jobs)) == num_launches
    together = bench.run(jobs)
    alone = [bench.run([job])[0] for job in jobs]
    for one, other in zip(together, alone, strict=True):
        # Small integers in float32: exact in any order of summation.
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_products_with_one_resident_weight_become_one_taller_product(bench: Bench) -> None:
    weight, bias = torch.randint(-5, 5, (24, 7)).float(), torch.arange(7.0)
    options = MatmulOptions(activation="relu")
    shapes = [(1, 24), (5, 24), (2, 3, 24), (16, 24)]
    made = [bench.job("matmul", options, a=bench.random(shape), b=weight, bias=bias) for shape in shapes]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_a_transposed_resident_weight_is_shared_too(bench: Bench) -> None:
    weight = torch.randint(-5, 5, (7, 24)).float()
    made = [
        bench.job("matmul", MatmulOptions(transpose_b=True), a=bench.random((rows, 24)), b=weight) for rows in (3, 1)
    ]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_softmax_rows_of_equal_length_concatenate_whatever_the_rank(bench: Bench) -> None:
    made = [
        bench.job("softmax", SoftmaxOptions(axis=axis), x=bench.random(shape))
        for shape, axis in (((33,), 0), ((4, 33), 1), ((2, 3, 33), -1))
    ]
    assert len({job.key for job in made}) == 1
    together = bench.run(made)
    for one, job in zip(together, made, strict=True):
        torch.testing.assert_close(one, bench.run([job])[0])


def test_sums_concatenate_flat(bench: Bench) -> None:
    made = [
        bench.job("add", AddOptions(alpha=3), a=bench.random(shape, "int32"), b=bench.random(shape, "int32"))
        for shape in ((5,), (2, 3), (), (4, 1, 7))
    ]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_small_products_of_equal_shape_stack(bench: Bench) -> None:
    made = [bench.job("matmul", MatmulOptions(), a=bench.random((3, 5)), b=bench.random((5, 4))) for _ in range(4)]
    assert_same_together_and_alone(bench, made, num_launches=1)


def test_small_products_of_unequal_shape_share_a_batch(bench: Bench) -> None:
    made = [
        bench.job("matmul", MatmulOptions(), a=bench.random((m, 5)), b=bench.random((5, n)))
        for m, n in ((3, 4), (2, 9))
    ]
    assert_same_together_and_alone(bench, made, num_launches=2)


def test_different_weights_options_dtypes_and_widths_never_share(bench: Bench) -> None:
    one, other = torch.ones(8, 4), torch.ones(8, 4)
    keys = [
        bench.job("matmul", MatmulOptions(), a=bench.random((2, 8)), b=one).key,
        bench.job("matmul", MatmulOptions(), a=bench.random((2, 8)), b=other).key,
        bench.job("matmul", MatmulOptions(activation="relu"), a=bench.random((2, 8)), b=one).key,
        bench.job("matmul", MatmulOptions(out_dtype="float16"), a=bench.random((2, 8)), b=one).key,
        bench.job("matmul", MatmulOptions(), a=bench.random((2, 8)), b=one, bias=torch.ones(4)).key,
        bench.job("softmax", SoftmaxOptions(), x=bench.random((2, 8))).key,
        bench.job("softmax", SoftmaxOptions(log=True), x=bench.random((2, 8))).key,
        bench.job("softmax", SoftmaxOptions(), x=bench.random((2, 9))).key,
        bench.job("add", AddOptions(), a=bench.random((2,)), b=bench.random((2,))).key,
        bench.job("add", AddOptions(alpha=1.0), a=bench.random((2,)), b=bench.random((2,))).key,
        bench.job("add", AddOptions(), a=bench.random((2,), "int32"), b=bench.random((2,), "int32")).key,
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_what_cannot_be_joined_runs_alone(bench: Bench) -> None:
    weight = torch.ones(8, 4)
    alone = [
        bench.job("matmul", MatmulOptions(transpose_a=True), a=bench.random((8, 2)), b=weight),
        bench.job("matmul", MatmulOptions(), a=bench.random((2, 8), fortran=True), b=weight),
        bench.job("matmul", MatmulOptions(), a=bench.random((2, 8)), b=weight, bias=bench.random((4,))),
        bench.job("matmul", MatmulOptions(), a=bench.random((0, 8)), b=weight),
        bench.job("softmax", SoftmaxOptions(axis=0), x=bench.random((2, 8))),
        bench.job("add", AddOptions(), a=bench.random((2, 8)), b=bench.random((8,))),
        bench.job("add", AddOptions(), a=bench.random((2, 8)), b=torch.ones(2, 8)),
    ]
    assert [job.key for job in alone] == [None] * len(alone)

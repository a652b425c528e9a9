"""Batches of unequal products, in the interpreter: each gets its own result, from slots and rows of any alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.host_pipeline import host_pipeline
from tests.support.jobs import JobBench
from tilewire.service.engine.backends.contract import LaunchSpec
from tilewire.service.engine.backends.gpu.grouped import Grouped, can_group
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import launch_alone
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.softmax import SoftmaxOptions

CPU = torch.device("cpu")
SHAPES = [(1, 8, 8), (70, 16, 24), (3, 5, 7), (65, 33, 66), (2, 64, 130)]


class Slots(JobBench):
    """A segment that fills up, and what moves it."""

    def __init__(self) -> None:
        super().__init__(align=8)
        self.staging = Staging(CPU)
        self.staging.add_mapped(self.mapped)

    def product(self, a: np.ndarray, b: np.ndarray, options: MatmulOptions) -> LaunchSpec:
        pair = [self.put(torch.from_numpy(array)) for array in (a, b)]
        return launch_alone(self.job("matmul", options, a=pair[0], b=pair[1]))


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:2]], ids=["some unaligned", "all aligned"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", "float32"), ("float16", "float32"), ("int8", "int32")])
def test_each_product_gets_its_own_result(slots, shapes, dtype, out_dtype):
    """Small integers, so that every sum is exact."""
    rng = np.random.default_rng(len(shapes))
    options = MatmulOptions(activation="relu", out_dtype=out_dtype)
    pairs = [[rng.integers(-3, 4, size).astype(dtype) for size in ((m, k), (k, n))] for m, k, n in shapes]
    launches = [slots.product(a, b, options) for a, b in pairs]
    epilogue = can_group(launches, slots.staging)
    assert epilogue is not None
    Grouped(epilogue, slots.staging).run(launches, host_pipeline()).wait()
    for (a, b), one in zip(pairs, launches, strict=True):
        expected = np.maximum(a.astype(np.int64) @ b.astype(np.int64), 0).astype(out_dtype)
        np.testing.assert_array_equal(tensor_of(one.outputs[0][0][0]).numpy(), expected)


def test_what_is_no_group_goes_the_general_way(slots):
    a, b = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)
    plain = slots.product(a, b, MatmulOptions())
    turned = slots.product(a, b.T.copy(), MatmulOptions(transpose_b=True))
    empty = slots.product(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32), MatmulOptions())
    elsewhere = Slots().product(a, b, MatmulOptions())
    there = slots.put(torch.from_numpy(a))
    shared = launch_alone(slots.job("matmul", MatmulOptions(), a=there, b=torch.ones(4, 3)))
    soft = launch_alone(slots.job("softmax", SoftmaxOptions(), x=there))
    assert can_group([plain, plain], slots.staging)
    for launches in ([plain], [turned, turned], [plain, empty], [plain, elsewhere], [plain, shared], [soft, soft]):
        assert not can_group(launches, slots.staging)

"""Batches of unequal products, in the interpreter: each gets its own result, from slots and rows of any alignment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tilewire.service.engine.backends.contract import HostBytes, Joined, Step
from tilewire.service.engine.backends.gpu.grouped import Group, can_group
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import join
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions

CPU = torch.device("cpu")
SHAPES = [(1, 8, 8), (70, 16, 24), (3, 5, 7), (65, 33, 66), (2, 64, 130)]


class Slots:
    """A segment that fills up, and what moves it."""

    def __init__(self) -> None:
        self.mapped = torch.zeros(2**20, dtype=torch.uint8)
        self.staging = Staging(CPU)
        self.staging.add_mapped(self.mapped)
        self._end = 0

    def take(self, kind: TensorType) -> HostBytes:
        place = HostBytes(self.mapped, kind, self._end)
        self._end += -(-kind.nbytes // 8) * 8
        return place

    def put(self, array: np.ndarray) -> HostBytes:
        place = self.take(TensorType(str(array.dtype), array.shape))
        if array.nbytes:
            self.mapped[place.offset : place.offset + array.nbytes] = torch.tensor(list(array.tobytes()))
        return place

    def product(self, a: np.ndarray, b: np.ndarray, options: MatmulOptions, out_dtype: str) -> Joined:
        out = self.take(TensorType(out_dtype, (a.shape[0], b.shape[1])))
        (joined,) = join([Step("matmul", options, {"a": self.put(a), "b": self.put(b)}, out)], None)
        return joined


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:2]], ids=["some unaligned", "all aligned"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("float32", "float32"), ("float16", "float32"), ("int8", "int32")])
def test_each_product_gets_its_own_result(slots, shapes, dtype, out_dtype):
    """Small integers, so that every sum is exact."""
    rng = np.random.default_rng(len(shapes))
    options = MatmulOptions(activation="relu")
    pairs = [[rng.integers(-3, 4, size).astype(dtype) for size in ((m, k), (k, n))] for m, k, n in shapes]
    launches = [slots.product(a, b, options, out_dtype) for a, b in pairs]
    assert can_group(launches, slots.staging)
    group = Group(launches, slots.staging)
    held: list[torch.Tensor] = []
    group.compute(group.gather(held))
    group.scatter(held)
    for (a, b), one in zip(pairs, launches, strict=True):
        expected = np.maximum(a.astype(np.int64) @ b.astype(np.int64), 0).astype(out_dtype)
        np.testing.assert_array_equal(tensor_of(one.outs[0]).numpy(), expected)


def test_what_is_no_group_goes_the_general_way(slots):
    a, b = np.ones((2, 4), np.float32), np.ones((4, 3), np.float32)
    plain = slots.product(a, b, MatmulOptions(), "float32")
    turned = slots.product(a, b, MatmulOptions(transpose_b=True), "float32")
    empty = slots.product(np.ones((2, 0), np.float32), np.ones((0, 3), np.float32), MatmulOptions(), "float32")
    elsewhere = Slots().product(a, b, MatmulOptions(), "float32")
    out = slots.take(TensorType("float32", (2, 3)))
    (shared,) = join([Step("matmul", MatmulOptions(), {"a": slots.put(a), "b": torch.ones(4, 3)}, out)], None)
    (soft,) = join([Step("softmax", SoftmaxOptions(), {"x": slots.put(a)}, slots.put(a))], None)
    assert can_group([plain, plain], slots.staging)
    for launches in ([plain], [turned, turned], [plain, empty], [plain, elsewhere], [plain, shared], [soft, soft]):
        assert not can_group(launches, slots.staging)

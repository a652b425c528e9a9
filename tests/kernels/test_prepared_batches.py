"""Batches of a kind that came before, in the interpreter: each request gets its own result from the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tilewire.service.engine.backends.gpu.prepared import (
    MOST_BYTES,
    MOST_OF_A_KIND,
    Addresses,
    PreparedBatch,
    PreparedBatches,
)

from tilewire.service.engine.backends.contract import HostBytes, Joined, Step
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import Form, join
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.registry import Options
from tilewire.service.ops.softmax import SoftmaxOptions

CPU = torch.device("cpu")
Given = np.ndarray | torch.Tensor


class Slots:
    """A segment that fills up."""

    def __init__(self) -> None:
        self.mapped = torch.zeros(2**21, dtype=torch.uint8)
        self._end = 0

    def put(self, array: np.ndarray) -> HostBytes:
        place = self.take(TensorType(str(array.dtype), array.shape))
        if array.nbytes:
            self.mapped[place.offset : place.offset + array.nbytes] = torch.tensor(list(array.tobytes()))
        return place

    def take(self, kind: TensorType) -> HostBytes:
        place = HostBytes(self.mapped, kind, self._end)
        self._end += -(-kind.nbytes // 256) * 256
        return place


@pytest.fixture
def slots() -> Slots:
    return Slots()


@pytest.fixture
def batches(slots: Slots) -> PreparedBatches:
    staging = Staging(CPU)
    staging.add_mapped(slots.mapped)
    return PreparedBatches(staging, [None], is_invariant=False)


def step(slots: Slots, options: Options, out: TensorType, **inputs: Given) -> Step:
    placed = {name: slots.put(given) if isinstance(given, np.ndarray) else given for name, given in inputs.items()}
    return Step("", options, placed, slots.take(out))


def alone(slots: Slots, options: Options, out: TensorType, **inputs: Given) -> list[Joined]:
    return join([step(slots, options, out, **inputs)], None)


def run(found: tuple[PreparedBatch, Addresses] | None, launches: Sequence[Joined]) -> list[np.ndarray]:
    assert found is not None
    batch, places = found
    (joined,) = launches
    batch.copy_in(places)
    batch.compute(len(places.outs), joined.shared)
    batch.copy_out(places)
    return [tensor_of(out).numpy().copy() for out in joined.outs]


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-4, 4, shape).astype(np.float32)


@pytest.mark.parametrize("width", [8, 7])
def test_a_second_request_of_a_kind_is_prepared_and_each_gets_its_own_result(slots, batches, width):
    """Rows of 7 are padded on the device, and are not where they come from."""
    rng = np.random.default_rng(width)
    w = torch.from_numpy(integers(rng, 5, width))
    for number in range(4):
        a = integers(rng, 3, 5)
        launches = alone(slots, MatmulOptions(), TensorType("float32", (3, width)), a=a, b=w)
        found = batches.find(launches)
        assert (found is None) == (number == 0)
        if number:
            np.testing.assert_array_equal(run(found, launches)[0], a @ w.numpy())


@pytest.mark.parametrize("width", [8, 7])
def test_batches_of_any_number_share_what_was_prepared(slots, batches, width):
    rng = np.random.default_rng(width)
    w = torch.from_numpy(integers(rng, 5, width))
    out = TensorType("float32", (2, width))
    prepared = set()
    for number, count in enumerate((3, 4, 2, 7, 8, 5)):
        rows = [integers(rng, 2, 5) for _ in range(count)]
        launches = join([step(slots, MatmulOptions(), out, a=a, b=w) for a in rows], (Form.ROWS,))
        found = batches.find(launches)
        assert (found is None) == (number == 0)
        if found is not None:
            prepared.add(found[0].capacity)
            for a, result in zip(rows, run(found, launches), strict=True):
                np.testing.assert_array_equal(result, a @ w.numpy())
    assert prepared == {4, 8}


@pytest.mark.parametrize("count", [2, 3])
def test_sums_softmaxes_and_stacked_products_are_batched(slots, batches, count):
    rng = np.random.default_rng(count)
    for _ in range(2):
        a, b = ([integers(rng, 4, 6) for _ in range(count)] for _ in "ab")
        wide = [integers(rng, 6, 4) for _ in range(count)]
        kind = TensorType("float32", (4, 6))
        sums = join([step(slots, AddOptions(alpha=2), kind, a=x, b=y) for x, y in zip(a, b, strict=True)], (Form.FLAT,))
        softs = join([step(slots, SoftmaxOptions(), kind, x=x) for x in a], (Form.ROWS,))
        square = TensorType("float32", (4, 4))
        stack = join(
            [step(slots, MatmulOptions(), square, a=x, b=y) for x, y in zip(a, wide, strict=True)], (Form.PRODUCTS,)
        )
        found = [batches.find(launches) for launches in (sums, softs, stack)]
    for x, y, result in zip(a, b, run(found[0], sums), strict=True):
        np.testing.assert_array_equal(result, x + 2 * y)
    for x, result in zip(a, run(found[1], softs), strict=True):
        shifted = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
        np.testing.assert_allclose(result, shifted / shifted.sum(-1, keepdims=True), rtol=1e-6)
    for x, y, result in zip(a, wide, run(found[2], stack), strict=True):
        np.testing.assert_array_equal(result, x @ y)


def test_every_op_and_option_alone(slots, batches):
    rng = np.random.default_rng(1)
    a, b, x = integers(rng, 6, 3), integers(rng, 4, 6), integers(rng, 2, 9)
    bias = torch.arange(4, dtype=torch.float32)
    shifted = np.exp(x.astype(np.float64) - x.max(0))
    cases: list[tuple[Options, dict[str, Given], np.ndarray]] = [
        (MatmulOptions(transpose_a=True, transpose_b=True), {"a": a, "b": b, "bias": bias}, a.T @ b.T + bias.numpy()),
        (MatmulOptions(activation="relu"), {"a": b, "b": a}, np.maximum(b @ a, 0)),
        (SoftmaxOptions(axis=0), {"x": x}, shifted / shifted.sum(0)),
        (AddOptions(alpha=3), {"a": x, "b": x}, 4 * x),
        (AddOptions(), {"a": np.array(2, np.float32), "b": np.array(3, np.float32)}, np.array(5)),
    ]
    for options, inputs, expected in cases:
        out = TensorType("float32", expected.shape)
        assert batches.find(alone(slots, options, out, **inputs)) is None
        launches = alone(slots, options, out, **inputs)
        np.testing.assert_allclose(run(batches.find(launches), launches)[0], expected, rtol=1e-6)


def test_a_replaced_resident_is_used_and_the_old_one_is_not_kept(slots, batches):
    a = np.ones((2, 4), np.float32)
    for factor in (1, 5):
        w = torch.full((4, 3), float(factor))
        for _ in range(2):
            launches = alone(slots, MatmulOptions(), TensorType("float32", (2, 3)), a=a, b=w)
            found = batches.find(launches)
        np.testing.assert_array_equal(run(found, launches)[0], np.full((2, 3), 4.0 * factor))
    assert found is not None
    assert not found[0].has({"b": torch.full((4, 3), 7.0)})


def test_a_batch_under_way_is_left_alone_and_so_many_may_be(slots, batches):
    x = np.ones((2, 4), np.float32)
    launches = alone(slots, SoftmaxOptions(), TensorType("float32", (2, 4)), x=x)
    assert batches.find(launches) is None
    found = []
    for _ in range(MOST_OF_A_KIND):
        one = batches.find(launches)
        assert one is not None
        one[0].is_busy = True
        found.append(one[0])
    assert len(set(map(id, found))) == MOST_OF_A_KIND
    assert batches.find(launches) is None
    found[1].is_busy = False
    again = batches.find(launches)
    assert again is not None
    assert again[0] is found[1]


def test_what_is_large_unequal_empty_or_several_launches_goes_the_general_way(slots, batches):
    x = np.ones((2, 4), np.float32)
    w = torch.ones(4, 4)
    one, two = TensorType("float32", (2, 4)), TensorType("float32", (3, 4))
    large = alone(slots, SoftmaxOptions(), TensorType("float32", (MOST_BYTES // 4,)), x=x)
    empty = alone(slots, MatmulOptions(), one, a=np.ones((2, 0), np.float32), b=np.ones((0, 4), np.float32))
    steps = [step(slots, MatmulOptions(), kind, a=np.ones(kind.shape, np.float32), b=w) for kind in (one, two)]
    plain = alone(slots, SoftmaxOptions(), one, x=x)
    for launches in (large, empty, join(steps, (Form.ROWS,)), [*plain, *plain]):
        assert [batches.find(launches) for _ in range(3)] == [None] * 3


def test_memory_that_the_device_does_not_reach_goes_the_general_way(batches):
    launches = alone(Slots(), SoftmaxOptions(), TensorType("float32", (4,)), x=np.ones(4, np.float32))
    assert [batches.find(launches) for _ in range(3)] == [None] * 3


def test_an_address_within_a_word_goes_the_general_way(slots, batches):
    x = np.ones((2, 4), np.float32)
    for _ in range(2):
        launches = alone(slots, SoftmaxOptions(), TensorType("float32", (2, 4)), x=x)
        found = batches.find(launches)
    assert found is not None
    launches[0].gathered["x"][0][0].offset += 4
    assert batches.find(launches) is None

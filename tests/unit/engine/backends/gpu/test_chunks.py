"""How large requests are parted: every row once, in parts worth a copy each, and whole where rows need one another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.engine.backends.contract import HostBytes, Joined, Step
from tilewire.service.engine.backends.gpu.chunks import MOST_PARTS, PART_BYTES, ROWS_STEP, Parts, parts_of
from tilewire.service.engine.loop.batching import join
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.registry import Options
from tilewire.service.ops.softmax import SoftmaxOptions

NOWHERE = torch.empty(0, dtype=torch.uint8)


def launch(options: Options, out: TensorType, *, fortran: bool = False, **inputs: TensorType | torch.Tensor) -> Joined:
    placed: dict[str, HostBytes | torch.Tensor] = {
        name: HostBytes(NOWHERE, given, 0, fortran) if isinstance(given, TensorType) else given
        for name, given in inputs.items()
    }
    (joined,) = join([Step("", options, placed, HostBytes(NOWHERE, out, 0))], None)
    return joined


def half(*shape: int) -> TensorType:
    return TensorType("bfloat16", shape)


LARGE = half(4096, 4096)


@pytest.mark.parametrize(
    ("one", "names"),
    [
        (launch(MatmulOptions(), LARGE, a=LARGE, b=LARGE), ("a",)),
        (launch(MatmulOptions(transpose_b=True), LARGE, a=LARGE, b=LARGE, bias=half(4096)), ("a",)),
        (launch(MatmulOptions(), LARGE, a=LARGE, b=torch.empty(1, 1)), ("a",)),
        (launch(SoftmaxOptions(axis=1), LARGE, x=LARGE), ("x",)),
        (launch(AddOptions(), LARGE, a=LARGE, b=LARGE), ("a", "b")),
        (launch(AddOptions(), half(3, 5000, 4999), a=half(3, 5000, 4999), b=half(3, 5000, 4999)), ("a", "b")),
    ],
)
def test_what_has_rows_of_its_own_is_parted(one: Joined, names: tuple[str, ...]) -> None:
    parts = parts_of(one)
    assert parts is not None
    assert parts.names == names
    assert parts.is_flat == isinstance(one.options, AddOptions)
    assert len(parts.spans()) > 1


@pytest.mark.parametrize(
    "one",
    [
        launch(MatmulOptions(transpose_a=True), LARGE, a=LARGE, b=LARGE),
        launch(MatmulOptions(), LARGE, a=LARGE, b=LARGE, fortran=True),
        launch(MatmulOptions(), LARGE, a=LARGE, b=LARGE, a_scale=TensorType("float32", (4096,))),
        launch(MatmulOptions(), LARGE, a=LARGE, b=LARGE, a_scale=torch.empty(4096)),
        launch(MatmulOptions(), half(8, 2048, 2048), a=half(8, 2048, 2048), b=half(2048, 2048)),
        launch(MatmulOptions(), half(4096, 1001), a=LARGE, b=half(4096, 1001)),
        launch(MatmulOptions(), half(256, 4096), a=half(256, 4096), b=LARGE),
        launch(MatmulOptions(), LARGE, a=torch.empty(1, 1), b=LARGE),
        launch(SoftmaxOptions(axis=0), LARGE, x=LARGE),
        launch(SoftmaxOptions(), half(4, 1 << 22), x=half(4, 1 << 22)),
        launch(SoftmaxOptions(), half(16, 4096), x=half(16, 4096)),
        launch(AddOptions(), LARGE, a=LARGE, b=half(4096)),
    ],
)
def test_what_is_small_or_needs_all_its_rows_or_padding_is_whole(one: Joined) -> None:
    assert parts_of(one) is None


@given(rows=st.integers(1, 100_000), width=st.integers(1, 1024))
def test_parts_are_all_rows_once_and_large(rows: int, width: int) -> None:
    kind = half(rows, 8 * width)
    parts = parts_of(launch(SoftmaxOptions(), kind, x=kind))
    if parts is None:
        assert kind.nbytes < 2 * PART_BYTES or rows < 2 * ROWS_STEP
        return
    assert isinstance(parts, Parts)
    spans = parts.spans()
    assert [row for begin, end in spans for row in (begin, end)] == sorted(
        [0, rows, *(2 * [number * parts.step for number in range(1, len(spans))])]
    )
    assert 2 <= len(spans) <= MOST_PARTS
    assert parts.step % ROWS_STEP == 0
    assert parts.step * 16 * width >= PART_BYTES

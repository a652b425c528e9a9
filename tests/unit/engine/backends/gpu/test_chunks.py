"""How large requests are cut: every row once, in chunks worth a copy each, and whole where rows need one another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.engine.backends.chunks import Chunks
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.gpu.chunks import CHUNK_BYTES, MAX_CHUNKS, ROWS_STEP, chunks_of
from tilewire.service.engine.loop.batching import launch_of
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import OpOptions, TensorType
from tilewire.service.ops.registry import OPS
from tilewire.service.ops.softmax import SoftmaxOptions

NOWHERE = torch.empty(0, dtype=torch.uint8)


def launch(
    options: OpOptions, out: TensorType, *, fortran: bool = False, **inputs: TensorType | torch.Tensor
) -> LaunchSpec:
    placed: dict[str, HostBytes | torch.Tensor] = {
        name: HostBytes(NOWHERE, given, 0, fortran) if isinstance(given, TensorType) else given
        for name, given in inputs.items()
    }
    return launch_of(OPS[str(options.__struct_config__.tag)], options, placed, [HostBytes(NOWHERE, out, 0)])


def half(*shape: int) -> TensorType:
    return TensorType("bfloat16", shape)


LARGE = half(4096, 4096)


@pytest.mark.parametrize(
    ("one", "names"),
    [
        (launch(MatmulOptions(), LARGE, a=LARGE, b=LARGE), ("a",)),
        (launch(MatmulOptions(transpose_b=True), LARGE, a=LARGE, b=LARGE, bias=half(4096)), ("a",)),
        (launch(MatmulOptions(), LARGE, a=LARGE, b=torch.empty(4096, 4096, dtype=torch.bfloat16)), ("a",)),
        (launch(SoftmaxOptions(axis=1), LARGE, x=LARGE), ("x",)),
        (launch(AddOptions(), LARGE, a=LARGE, b=LARGE), ("a", "b")),
        (launch(AddOptions(), half(3, 5000, 4999), a=half(3, 5000, 4999), b=half(3, 5000, 4999)), ("a", "b")),
    ],
)
def test_what_has_rows_of_its_own_is_cut(one: LaunchSpec, names: tuple[str, ...]) -> None:
    chunks = chunks_of(one)
    assert chunks is not None
    assert chunks.names == names
    assert chunks.is_flat == (one.op.name == "add")
    assert len(chunks.spans()) > 1


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
        launch(MatmulOptions(), LARGE, a=torch.empty(4096, 4096, dtype=torch.bfloat16), b=LARGE),
        launch(SoftmaxOptions(axis=0), LARGE, x=LARGE),
        launch(SoftmaxOptions(), half(4, 1 << 22), x=half(4, 1 << 22)),
        launch(SoftmaxOptions(), half(16, 4096), x=half(16, 4096)),
        launch(SoftmaxOptions(), half(2048, 16, 512), x=half(2048, 16, 512)),
        launch(AddOptions(), LARGE, a=LARGE, b=half(4096)),
    ],
)
def test_what_is_small_or_needs_all_its_rows_or_padding_is_whole(one: LaunchSpec) -> None:
    assert chunks_of(one) is None


@given(rows=st.integers(1, 100_000), width=st.integers(1, 1024))
def test_chunks_are_all_rows_once_and_large(rows: int, width: int) -> None:
    kind = half(rows, 8 * width)
    chunks = chunks_of(launch(SoftmaxOptions(), kind, x=kind))
    if chunks is None:
        assert kind.nbytes < 2 * CHUNK_BYTES or rows < 2 * ROWS_STEP
        return
    assert isinstance(chunks, Chunks)
    spans = chunks.spans()
    assert [row for begin, end in spans for row in (begin, end)] == sorted(
        [0, rows, *(2 * [number * chunks.step for number in range(1, len(spans))])]
    )
    assert 2 <= len(spans) <= MAX_CHUNKS
    assert chunks.step % ROWS_STEP == 0
    assert chunks.step * 16 * width >= CHUNK_BYTES

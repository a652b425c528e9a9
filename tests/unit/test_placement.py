"""Parts of tensors: every element in one part, where the whole has it, and parts of nearly equal size."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.op import TensorType
from tilewire.service.placement import check_shard, long_axis, part_of, placement_of

SHAPES = st.lists(st.integers(0, 5), max_size=2).map(tuple)


@given(
    outer=SHAPES,
    inner=st.integers(1, 5),
    size=st.integers(1, 5000),
    count=st.integers(1, 8),
    axis=st.sampled_from([-1, -2]),
)
def test_parts_are_the_whole(outer: tuple[int, ...], inner: int, size: int, count: int, axis: int) -> None:
    shape = (*outer, inner, size) if axis == -1 else (*outer, size, inner)
    kind = TensorType("int32", shape)
    parts = [part_of(kind, axis, index, count) for index in range(count)]
    assert (parts[0].begin, parts[-1].end) == (0, size)
    assert all(one.end == other.begin for one, other in itertools.pairwise(parts))
    sizes = [part.end - part.begin for part in parts]
    if size >= count:
        assert min(sizes) > 0
        # 128 columns beside 8 times as many, at most.
        assert max(sizes) <= 1.2 * size / count + 1
    whole = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    for part in parts:
        rows, pitch = part.rows_in(kind)
        begin = part.offset_in(kind) // 4
        index = begin + np.arange(rows.shape[0])[:, None] * (pitch // 4) + np.arange(rows.shape[1])
        cut = whole.take(np.arange(part.begin, part.end), axis)
        np.testing.assert_array_equal(index.reshape(cut.shape), cut)
        assert part.type_of(kind).shape == cut.shape


@pytest.mark.parametrize(
    ("nbytes", "count", "placement"),
    [(64, 2, "replicate"), (65, 2, "single"), (1024, 2, "single"), (1025, 2, "shard"), (1025, 1, "single")],
)
def test_what_exceeds_one_device_is_cut(nbytes: int, count: int, placement: str) -> None:
    assert placement_of(nbytes, 1024, count) == placement


def test_the_longer_of_the_last_axes_is_cut() -> None:
    for shape, axis in (((3, 4), -1), ((4, 3), -2), ((3, 3), -1), ((5,), -1), ((9, 2, 3), -1)):
        assert long_axis(TensorType("int8", shape)) == axis


@pytest.mark.parametrize(("shape", "axis", "named"), [((), -1, "axis"), ((4,), -2, "axis"), ((4, 1), -1, "placement")])
def test_what_has_no_part_for_each_engine_is_refused(shape: tuple[int, ...], axis: int, named: str) -> None:
    check_shard(TensorType("int8", (2, 2)), axis, 2)
    with pytest.raises(InvalidRequest, match=named):
        check_shard(TensorType("int8", shape), axis, 2)

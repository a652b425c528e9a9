"""Merging and broadcasting of dimensions, over random shapes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewire.kernels.runtime.strides import broadcast_shapes, broadcast_strides, collapse

extents = st.lists(st.integers(1, 4), min_size=0, max_size=5)


def addresses(shape, strides):
    grid = torch.zeros(tuple(shape), dtype=torch.long)
    for dim, (extent, stride) in enumerate(zip(shape, strides, strict=True)):
        steps = torch.arange(extent) * stride
        grid = grid + steps.reshape([-1 if other == dim else 1 for other in range(len(shape))])
    return grid.reshape(-1)


@given(extents, st.randoms())
def test_collapse_walks_the_same_elements(shape, random):
    tensor = torch.empty(shape)
    order = list(range(len(shape)))
    random.shuffle(order)
    shuffled = tensor.permute(order)
    merged, (mine, other) = collapse(shuffled.shape, shuffled.stride(), shuffled.contiguous().stride())
    assert torch.equal(addresses(merged, mine), addresses(shuffled.shape, shuffled.stride()))
    assert torch.equal(addresses(merged, other), torch.arange(tensor.numel()))


@given(extents)
def test_contiguous_merges_into_one(shape):
    merged, _ = collapse(shape, torch.empty(shape).stride())
    assert len(merged) == (torch.empty(shape).numel() > 1)


@given(st.data())
def test_broadcasting_as_torch(data):
    whole = data.draw(extents)
    parts = []
    for _ in range(2):
        cut = data.draw(st.integers(0, len(whole)))
        parts.append([data.draw(st.sampled_from([1, extent])) for extent in whole[cut:]])
    shape = broadcast_shapes(*parts)
    assert shape == tuple(torch.broadcast_shapes(*parts))
    for part in parts:
        tensor = torch.empty(part)
        expanded = tensor.expand(shape)
        assert torch.equal(
            addresses(shape, broadcast_strides(part, tensor.stride(), shape)), addresses(shape, expanded.stride())
        )


def test_refuses_what_does_not_broadcast():
    with pytest.raises(ValueError, match="broadcast"):
        broadcast_shapes((2, 3), (4,))

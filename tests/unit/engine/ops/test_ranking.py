"""The best elements of rows, against Python's sort of the same numbers."""

from __future__ import annotations

import math

import pytest
import torch

from tilewire.service.engine.ops import ranking

SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1.5, -1.5, 6e-8, -6e-8, 65504.0, -65504.0]


def reference(row: list[float], k: int, *, largest: bool, is_nan_large: bool) -> list[int]:
    """Indices of the k best: NaN at its end, numbers by value, equals by index."""
    sign = -1 if largest else 1

    def key(index: int) -> tuple[int, float, int]:
        value = row[index]
        if math.isnan(value):
            return (-1 if largest and is_nan_large else 1), 0.0, index
        return 0, sign * value, index

    return sorted(range(len(row)), key=key)[:k]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("is_nan_large", [True, False])
def test_special_numbers_and_ties(dtype: torch.dtype, *, largest: bool, is_nan_large: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.tensor(SPECIAL, dtype=dtype)
    x = pool[torch.randint(len(pool), (40, 57), generator=generator)]
    # NaN whose sign is set, which a sort by bits would take for the smallest.
    x[::3] = torch.where(x[::3].isnan(), -x[::3], x[::3])
    for k in (1, 7, 57):
        values, indices = ranking.best(x, k, largest=largest, is_nan_large=is_nan_large)
        wanted = [reference(row, k, largest=largest, is_nan_large=is_nan_large) for row in x.tolist()]
        assert indices.tolist() == wanted
        # Bits of the input, the sign of 0 too.
        bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        assert values.dtype == dtype
        assert torch.equal(values.view(bits), x.gather(-1, indices).view(bits))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis(axis: int) -> None:
    x = torch.randint(9, (6, 11, 7), generator=torch.Generator().manual_seed(2)).float()
    values, indices = ranking.best(x, 3, largest=True, is_nan_large=True, axis=axis)
    wanted = x.sort(dim=axis, descending=True, stable=True)
    assert torch.equal(values, wanted.values.narrow(axis, 0, 3))
    assert torch.equal(indices, wanted.indices.narrow(axis, 0, 3))


@pytest.mark.parametrize("shape", [(3, ranking.MAX_RANKED + 1), (5, ranking.MAX_RANKED // 2 - 1), (0, 4)])
def test_rows_longer_and_shorter_than_are_ranked_at_once(shape: tuple[int, int]) -> None:
    x = torch.randint(1000, shape, generator=torch.Generator().manual_seed(3)).float()
    values, indices = ranking.best(x, 4, largest=False, is_nan_large=False)
    wanted = x.sort(dim=-1, stable=True)
    assert torch.equal(values, wanted.values[..., :4])
    assert torch.equal(indices, wanted.indices[..., :4])

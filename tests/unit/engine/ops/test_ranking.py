"""The best elements of rows, against Python's sort of the same numbers."""

from __future__ import annotations

import math
import time

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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("has_nan", [True, False])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("is_nan_large", [True, False])
def test_special_numbers_and_ties_of_long_rows(
    dtype: torch.dtype, *, has_nan: bool, largest: bool, is_nan_large: bool
) -> None:
    """Of which most blocks are left out; the last elements are in none."""
    count = 3 * ranking.BLOCK**2 + 5
    generator = torch.Generator().manual_seed(2)
    pool = torch.tensor([one for one in SPECIAL if has_nan or not math.isnan(one)], dtype=dtype)
    x = pool[torch.randint(len(pool), (12, count), generator=generator)]
    assert x.numel() >= ranking.MIN_IN_BLOCKS
    # Few numbers of note, in some rows at the end alone.
    ordinary = torch.rand(x.shape, generator=generator)
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.001, x, ordinary.to(dtype))
    x[::2, -3:] = pool[:3]
    for k in (1, 7, count // (2 * ranking.BLOCK)):
        _, indices = ranking.best(x, k, largest=largest, is_nan_large=is_nan_large)
        assert indices.tolist() == [reference(row, k, largest=largest, is_nan_large=is_nan_large) for row in x.tolist()]


@pytest.mark.parametrize("part", [slice(None, 5000), slice(3, None)])
def test_long_rows_that_lie_among_others(part: slice) -> None:
    x = torch.randint(99, (7000, 11), generator=torch.Generator().manual_seed(4)).float()
    for rows in (x[part].mT, x.mT[:, part]):
        assert torch.equal(
            ranking.best(rows, 5, largest=True, is_nan_large=True)[1],
            rows.sort(dim=-1, descending=True, stable=True).indices[:, :5],
        )


@pytest.mark.alone
def test_the_best_of_long_rows_take_about_as_long_as_torch_takes() -> None:
    """Which keeps no order among equals. Ranking every element took six times as long."""
    x = torch.randn((40, 10_000), generator=torch.Generator().manual_seed(5))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ours, torchs = math.inf, math.inf
    for _ in range(10):
        began = time.perf_counter()
        ranking.best(x, 10, largest=True, is_nan_large=True)
        middle = time.perf_counter()
        x.topk(10)
        ours, torchs = min(ours, middle - began), min(torchs, time.perf_counter() - middle)
    torch.set_num_threads(threads)
    assert ours < 2.5 * torchs


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

"""The most rows, and the most elements along an axis, that kernels count. Some operands have more than 2^31 elements.

Grids have 65,535 programs at most along axes but the first: what has more blocks than that, too.
"""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels.copy.op import CopyRange, copy_ranges
from tilewire.kernels.matmul.op import matmul
from tilewire.kernels.normalize.op import normalize
from tilewire.kernels.reduce.op import reduce
from tilewire.kernels.runtime.rows import MAX_COUNT
from tilewire.kernels.search.op import search
from tilewire.kernels.softmax.op import softmax
from tilewire.kernels.topk.op import topk

N = MAX_COUNT


def filled(value: float, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device="cuda")


def test_softmax_of_a_row():
    x = filled(-200.0, 1, N)
    x[0, [7, -2]] = 0
    out = softmax(x)
    assert out[0, [7, -2]].tolist() == [0.5, 0.5]
    assert out.count_nonzero() == 2


@pytest.mark.parametrize("shape", [(N, 1), (N, 3)])
def test_softmax_of_rows(shape):
    x = filled(0.0, *shape)
    x[-1, 0] = 5
    out = softmax(x)
    assert torch.allclose(out[-1].float(), torch.softmax(x[-1].float(), -1), rtol=1e-2)
    assert bool((out[:-1] == out[0, 0]).all())


def test_softmax_along_columns():
    x = filled(-200.0, N, 2)
    x[[7, -2]] = 0
    out = softmax(x, axis=0)
    assert out[[7, -2]].tolist() == [[0.5, 0.5]] * 2
    assert out.count_nonzero() == 4


@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_normalize(kind):
    x = filled(1.0, 1, N)
    x[0, ::2] = -1
    scale = 2**-15 if kind == "l2" else 1
    assert torch.equal(normalize(x, kind), x * scale)
    x = filled(1.0, N, 2)
    x[:, 1] = -1
    expected = normalize(x[:8].clone(), kind)[0]
    assert bool((normalize(x, kind) == expected).all())


def test_topk():
    x = filled(0.0, 1, N)
    x[0, [5, -2]] = torch.tensor([9.0, 7.0], dtype=x.dtype, device="cuda")
    values, indices = topk(x, 3)
    assert (values.tolist(), indices.tolist()) == ([[9, 7, 0]], [[5, N - 2, 0]])
    x = filled(0.0, N, 3)
    x[:, 2] = 1
    values, indices = topk(x, 2)
    assert bool((values == values[0]).all())
    assert bool((indices == torch.tensor([2, 0], device="cuda")).all())


@pytest.mark.parametrize("kind", ["sum", "max", "argmax", "logsumexp", "norm"])
def test_reduce(kind):
    x = filled(-200.0 if kind == "logsumexp" else 0.0, 1, N)
    x[0, -5] = 1
    number = N - 5 if kind == "argmax" else 1
    for axis in (-1, None):
        assert reduce(x, kind, axis=axis).tolist() in (number, [number])
    x = filled(0.0, N, 3)
    x[:, 1] = 2
    expected = reduce(x[:8].clone(), kind)[0]
    assert bool((reduce(x, kind) == expected).all())


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_search(metric):
    items, query = filled(1.0, N, 1, dtype=torch.int8), filled(3.0, 1, 1, dtype=torch.int8)
    items[[11, -3], 0] = torch.tensor([2, 3], dtype=torch.int8, device="cuda")
    _values, indices = search(query, items, 2, metric=metric)
    assert indices.tolist() == [[N - 3, 11]]


def test_search_of_queries():
    queries, items = filled(1.0, N, 1), filled(1.0, 2, 1)
    queries[-3:] = -1
    items[1] = 2
    _values, indices = search(queries, items, 1)
    assert indices[-4:, 0].tolist() == [1, 0, 0, 0]
    assert indices.sum() == N - 3


def test_matmul():
    for a, b in ((filled(1.0, N, 1), filled(3.0, 1, 1)), (filled(3.0, 1, 1), filled(1.0, 1, N))):
        (a if len(a) > 1 else b).view(-1)[-3:] = 2
        out = matmul(a, b).view(-1)
        assert out[-4:].tolist() == [3, 6, 6, 6]
        assert bool((out[:-3] == 3).all())
    a, b = filled(0.0, 1, N), filled(1.0, N, 1)
    a[0, [3, -3]] = 2
    assert matmul(a, b).tolist() == [[4]]


def test_search_of_many_queries_among_few_items():
    generator = torch.Generator("cuda").manual_seed(1)
    queries = torch.randn((5_000_000, 8), generator=generator, device="cuda")
    items = torch.randn((100, 8), generator=generator, device="cuda")
    _values, indices = search(queries, items, 1, metric="l2")
    for part in (slice(0, 100_000), slice(-100_000, None)):
        distances = torch.cdist(queries[part].double(), items.double())
        chosen = distances.gather(-1, indices[part])[:, 0]
        assert torch.allclose(chosen, distances.amin(-1), rtol=1e-5)


@pytest.mark.parametrize("step", [1, 2], ids=["rows of odd length", "columns apart"])
def test_batches_that_are_copied(step):
    generator = torch.Generator("cuda").manual_seed(2)
    a = torch.randint(-3, 4, (70_000, 37 * step, 51 * step), generator=generator, device="cuda").bfloat16()
    b = torch.randint(-3, 4, (70_000, 51, 45), generator=generator, device="cuda").bfloat16()
    a = a[:, ::step, ::step]
    # Whole numbers: the sums are exact before they are rounded.
    assert torch.equal(matmul(a, b), (a.float() @ b.float()).bfloat16())


def test_a_long_range_of_odd_bytes():
    source = torch.arange(300_000_003, device="cuda").to(torch.uint8)
    destination = torch.zeros_like(source)
    held = copy_ranges(
        [CopyRange(source.data_ptr() + 1, destination.data_ptr() + 1, source.numel() - 2)], source.device
    )
    torch.cuda.synchronize()
    assert held is not None
    assert torch.equal(destination[1:-1], source[1:-1])
    assert not destination[[0, -1]].any()

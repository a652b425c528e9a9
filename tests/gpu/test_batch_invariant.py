"""With `batch_invariant` a row has the same bits alone, among other rows and among other products."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels import matmul, normalize, reduce, search, softmax, topk


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261121)


@pytest.mark.parametrize("precision", ["ieee", "tf32x3", "tf32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1000, 777), (64, 65), (65, 64), (333, 777), (11008, 4096)])
def test_products(dtype, n, k, precision, generator):
    a = torch.randn((600, k), generator=generator, device="cuda").to(dtype)
    b = torch.randn((k, n), generator=generator, device="cuda").to(dtype)
    whole = matmul(a, b, precision=precision, batch_invariant=True)
    for rows in (slice(0, 1), slice(7, 23), slice(100, 164), slice(300, 600)):
        alone = a[rows].clone()
        assert torch.equal(matmul(alone, b, precision=precision, batch_invariant=True), whole[rows])
        # As staging lays them.
        padded = torch.empty((len(alone), -(-k // 64) * 64), dtype=dtype, device="cuda")[:, :k]
        padded.copy_(alone)
        assert torch.equal(matmul(padded, b, precision=precision, batch_invariant=True), whole[rows])
    stacked = matmul(torch.stack([a[:16], a[16:32]]), b.expand(2, -1, -1), precision=precision, batch_invariant=True)
    assert torch.equal(stacked[1], whole[16:32])


@pytest.mark.parametrize("n", [100, 1000, 5000, 20000, 40000, 200001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax(dtype, n, generator):
    x = torch.randn((300, n), generator=generator, device="cuda").to(dtype)
    whole = softmax(x, batch_invariant=True)
    for rows in (slice(0, 1), slice(7, 23), slice(250, 300)):
        assert torch.equal(softmax(x[rows].clone(), batch_invariant=True), whole[rows])


@pytest.mark.parametrize("kind", ["sum", "mean", "norm", "logsumexp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(300, 20), (300, 777), (64, 100_001), (4, 1_000_000), (9, 5000, 33)])
def test_reductions(kind, dtype, shape, generator):
    x = torch.randn(shape, generator=generator, device="cuda").to(dtype)
    whole = reduce(x, kind, axis=1, batch_invariant=True)
    for row in range(0, shape[0], 3):
        assert torch.equal(reduce(x[row : row + 1].clone(), kind, axis=1, batch_invariant=True)[0], whole[row])


@pytest.mark.parametrize("kind", ["layer", "rms", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [33, 64, 777, 1000, 20_001, 100_001])
def test_normalize(kind, dtype, n, generator):
    x = torch.randn((300, n), generator=generator, device="cuda").to(dtype)
    whole = normalize(x, kind=kind)
    for rows in (slice(0, 1), slice(7, 23), slice(250, 300)):
        assert torch.equal(normalize(x[rows].clone(), kind=kind), whole[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("items", "n"), [(5000, 64), (5000, 65), (333, 777), (50_000, 256)])
def test_search(dtype, items, n, generator):
    queries = torch.randn((300, n), generator=generator, device="cuda").to(dtype)
    b = torch.randn((items, n), generator=generator, device="cuda").to(dtype)
    whole = search(queries, b, 5, batch_invariant=True)
    for rows in (slice(0, 1), slice(7, 23), slice(100, 164)):
        alone = search(queries[rows].clone(), b, 5, batch_invariant=True)
        assert all(torch.equal(one, of_all[rows]) for one, of_all in zip(alone, whole, strict=True))


@pytest.mark.parametrize("n", [33, 777, 20_001])
def test_topk(n, generator):
    x = torch.randn((300, n), generator=generator, device="cuda")
    whole = topk(x, 5)
    for rows in (slice(0, 1), slice(7, 23)):
        assert all(torch.equal(one, of_all[rows]) for one, of_all in zip(topk(x[rows].clone(), 5), whole, strict=True))

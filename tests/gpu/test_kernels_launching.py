"""What only a real launch shows: prepared launches, graphs, grouped products, stores that end where they should."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tests.support.kernel_bounds import matmul_bound
from tests.support.matmul_reference import matmul_reference
from tilewire.kernels import grouped_matmul, matmul, prepare_add, prepare_matmul, prepare_softmax
from tilewire.kernels.build.operands import random_operand


@pytest.fixture
def generator():
    return torch.Generator("cuda").manual_seed(20261121)


def test_launches_go_through_the_driver(generator):
    x = random_operand((128, 128), torch.bfloat16, generator)
    out = torch.empty_like(x)
    assert prepare_matmul(x, x, out).is_bound
    assert prepare_add(x, x, out).is_bound
    assert prepare_softmax(x, out).is_bound


@pytest.mark.parametrize("shape", [(256, 256, 256), (16, 4096, 4096), (2048, 2048, 512)], ids=str)
def test_a_prepared_product_follows_its_operands(shape, generator):
    m, n, k = shape
    operands = [
        (random_operand((m, k), torch.bfloat16, generator), random_operand((k, n), torch.bfloat16, generator))
        for _ in range(3)
    ]
    out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    launch = prepare_matmul(*operands[0], out)
    for a, b in operands:
        launch(a, b, out)
        assert torch.equal(out, matmul(a, b))


@pytest.mark.parametrize("shape", [(16, 4096, 4096), (128, 128, 16384), (512, 512, 512)], ids=str)
def test_graphs_replay(shape, generator):
    m, n, k = shape
    a, b = random_operand((m, k), torch.bfloat16, generator), random_operand((k, n), torch.bfloat16, generator)
    out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    launch = prepare_matmul(a, b, out)
    stream = torch.cuda.Stream()
    # The operands are made on the stream before it.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch(a, b, out)
        expected = out.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(5):
                launch(a, b, out)
        out.zero_()
        graph.replay()
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("n", [129, 131, 135, 136, 781, 257])
@pytest.mark.parametrize("m", [3, 40, 200, 1000])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_stores_end_with_the_row(m, n, out_dtype, generator):
    a, b = random_operand((m, 128), torch.bfloat16, generator), random_operand((128, 1024), torch.bfloat16, generator)
    whole = torch.full((m + 8, 1024), float("nan"), dtype=out_dtype, device="cuda")
    matmul(a, b[:, :n], out_dtype=out_dtype, out=whole[:m, :n])
    assert not whole[:m, :n].isnan().any()
    assert whole[:m, n:].isnan().all()
    assert whole[m:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("b_major", ["n", "k"])
@pytest.mark.parametrize("step", [1, 16])
def test_grouped_products(dtype, b_major, step, generator):
    sizes = (torch.randint(1, 300 // step, (70, 3), generator=generator, device="cuda") * step).tolist()
    a = [random_operand((m, k), dtype, generator) for m, _, k in sizes]
    b = [random_operand((k, n), dtype, generator) for _, n, k in sizes]
    b = [x if b_major == "n" else x.T.contiguous().T for x in b]
    for left, right, out in zip(a, b, grouped_matmul(a, b), strict=True):
        expected = matmul_reference(left, right)
        bound = matmul_bound(left, right, expected, out.dtype, str(dtype).removeprefix("torch."))
        assert ((out.double() - expected).abs() <= bound).all()

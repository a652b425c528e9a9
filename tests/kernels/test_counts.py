"""Most rows and elements that kernels count: the same number in the service, and refused before anything is launched."""

import pytest
import torch

from tilewire.kernels.matmul.op import matmul
from tilewire.kernels.matmul.view import view_of
from tilewire.kernels.normalize.op import normalize
from tilewire.kernels.reduce.op import reduce
from tilewire.kernels.runtime.rows import MAX_COUNT
from tilewire.kernels.runtime.strides import Extent
from tilewire.kernels.search.op import search
from tilewire.kernels.softmax.op import softmax
from tilewire.kernels.topk.op import topk
from tilewire.service.ops import op as service_op

TOO_MANY = MAX_COUNT + 1


def spread(*shape: int) -> torch.Tensor:
    """A tensor of this shape whose elements are one."""
    return torch.ones(()).expand(shape)


def test_the_service_refuses_what_kernels_do() -> None:
    assert service_op.MAX_COUNT == MAX_COUNT


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: softmax(spread(2, TOO_MANY)), "x: expected at most .* elements"),
        (lambda: softmax(spread(TOO_MANY, 2)), "x: expected at most .* rows"),
        (lambda: normalize(spread(TOO_MANY), "rms"), "x: .* elements"),
        (lambda: topk(spread(TOO_MANY), 1), "x: .* elements"),
        (lambda: reduce(spread(TOO_MANY), "sum"), "x: .* elements"),
        (lambda: reduce(spread(MAX_COUNT, 2), "sum", axis=None), "x: .* elements"),
        (lambda: matmul(spread(TOO_MANY, 1), spread(1, 1)), "a: .* rows"),
        (lambda: matmul(spread(1, 1), spread(1, TOO_MANY)), "b: .* columns"),
        (lambda: matmul(spread(TOO_MANY, 1, 1), spread(1, 1)), "a: .* matrices"),
        (lambda: search(spread(1, 1), spread(TOO_MANY, 1), 1), "b: .* items"),
    ],
)
def test_too_many(call, named) -> None:
    with pytest.raises(ValueError, match=named):
        call()


def test_rows_without_elements_have_results_too() -> None:
    with pytest.raises(ValueError, match=r"x: .* rows"):
        reduce(spread(TOO_MANY, 0), "sum")


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        (lambda: softmax(spread(TOO_MANY, 0)), (TOO_MANY, 0)),
        (lambda: normalize(spread(0, TOO_MANY), "rms"), (0, TOO_MANY)),
        (lambda: reduce(spread(0, TOO_MANY), "sum"), (0,)),
        (lambda: matmul(spread(TOO_MANY, 1), spread(1, 0)), (TOO_MANY, 0)),
    ],
)
def test_results_without_elements_have_no_limit(call, shape) -> None:
    assert call().shape == shape


@pytest.mark.parametrize(("entries", "view"), [(2**14, (2**30, (1, 1))), (2**14 + 1, (2**16, (1, 2**14 + 1)))])
def test_entries_of_a_batch_are_rows_of_one_product_as_far_as_kernels_count_them(entries, view) -> None:
    m, n, k = 2**16, 2, 1
    a, b, out = (
        Extent((entries, m, k), (m * k, k, 1)),
        Extent((k, n), (n, 1)),
        Extent((entries, m, n), (m * n, n, 1)),
    )
    walked = view_of(a, b, out, is_row_scaled=False)
    assert walked is not None
    assert (walked.m, walked.batch) == view

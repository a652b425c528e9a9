"""Merge of the best of parts: what one selection over all would give."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilewire.service.engine.ops.merge import merge
from tilewire.service.engine.ops.op import Operands
from tilewire.service.engine.ops.registry import ENGINE_OPS
from tilewire.service.ops.merge import MergeOptions
from tilewire.service.ops.op import OpOptions
from tilewire.service.ops.search import Metric, SearchOptions
from tilewire.service.ops.topk import TopkOptions

EDGES = (0, 5, 9, 30)


def best(op: str, options: OpOptions, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return ENGINE_OPS[op].cpu(Operands(inputs, {}), options, [torch.float32, torch.int64])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("k", [1, 4, 7, 30])
def test_the_best_of_parts_are_those_of_the_whole(dtype: torch.dtype, largest: bool, k: int) -> None:
    torch.manual_seed(k)
    x = torch.randint(-3, 4, (4, 30)).to(dtype)
    x[torch.rand(x.shape) < 0.2] = torch.nan
    x[torch.rand(x.shape) < 0.1] = torch.inf
    x[torch.rand(x.shape) < 0.1] = -torch.inf
    parts = [x[:, begin:end] for begin, end in itertools.pairwise(EDGES)]
    found = [best("topk", TopkOptions(k=min(k, part.shape[1]), largest=largest), {"x": part}) for part in parts]
    counts = tuple((values.shape[1], begin) for (values, _), begin in zip(found, EDGES, strict=False))
    options = MergeOptions(k, largest, is_nan_large=True, parts=counts)
    values, indices = merge(torch.cat([one for one, _ in found], 1), torch.cat([one for _, one in found], 1), options)
    expected = best("topk", TopkOptions(k=k, largest=largest), {"x": x})
    torch.testing.assert_close(indices, expected[1])
    torch.testing.assert_close(values, expected[0], equal_nan=True)


@pytest.mark.parametrize("metric", ["dot", "l2"])
def test_scores_that_are_no_numbers_come_last(metric: Metric) -> None:
    a, b = torch.tensor([[1.0], [-2.0]]), torch.randint(-2, 3, (30, 1)).float()
    b[3] = b[7] = b[20] = torch.nan
    bias = torch.zeros(30)
    bias[[1, 11]] = torch.inf
    bias[[2, 12]] = -torch.inf
    found = [
        best(
            "search", SearchOptions(k=end - begin, metric=metric), {"a": a, "b": b[begin:end], "bias": bias[begin:end]}
        )
        for begin, end in itertools.pairwise(EDGES)
    ]
    counts = tuple((values.shape[1], begin) for (values, _), begin in zip(found, EDGES, strict=False))
    options = MergeOptions(30, metric == "dot", is_nan_large=False, parts=counts)
    values, indices = merge(torch.cat([one for one, _ in found], 1), torch.cat([one for _, one in found], 1), options)
    expected = best("search", SearchOptions(k=30, metric=metric), {"a": a, "b": b, "bias": bias})
    torch.testing.assert_close(indices, expected[1])
    torch.testing.assert_close(values, expected[0], equal_nan=True)

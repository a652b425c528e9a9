"""Scratch memory: what grows by little is not held many times."""

import torch

from tilewire.kernels.runtime.workspace import workspace

CPU = torch.device("cpu")
# Of no other test.
STREAM = 20261130


def test_a_little_more_each_time_takes_few_allocations():
    held = {}
    for number in range(2**23, 2**25, 2**19):
        partial, count = workspace(CPU, STREAM, number, number >> 8)
        assert partial.numel() >= number
        assert count.numel() >= number >> 8
        assert not count.any()
        for tensor in (partial, count):
            held[tensor.data_ptr()] = tensor.nbytes
    assert sum(held.values()) <= 2 * (partial.nbytes + count.nbytes)


def test_streams_share_nothing():
    first, second = (workspace(CPU, STREAM + number, 1, 1) for number in (1, 2))
    assert {tensor.data_ptr() for tensor in first}.isdisjoint(tensor.data_ptr() for tensor in second)
    again = workspace(CPU, STREAM + 1, 1, 1)
    assert [tensor.data_ptr() for tensor in again] == [tensor.data_ptr() for tensor in first]

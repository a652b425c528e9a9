"""Lone requests of a kind that came before, in the interpreter: each gets its own result from the memory that they share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from service.engine.backends.contract import HostBytes, Joined, Step
from service.engine.backends.host import tensor_of
from service.engine.backends.solo import MOST_BYTES, Solo, Solos
from service.engine.backends.staging import Staging
from service.engine.forms import join
from service.ops import AddOptions, MatmulOptions, Options, SoftmaxOptions, TensorType

CPU = torch.device("cpu")


@pytest.fixture
def mapped() -> torch.Tensor:
    return torch.zeros(2**21, dtype=torch.uint8)


@pytest.fixture
def solos(mapped: torch.Tensor) -> Solos:
    staging = Staging(CPU)
    staging.add_mapped(mapped)
    return Solos(staging, CPU, is_invariant=False)


def request(mapped: torch.Tensor, options: Options, out: TensorType, at: int, **inputs: object) -> Joined:
    """One request; arrays go into the segment one after another from `at`, tensors are residents."""
    placed: dict[str, HostBytes | torch.Tensor] = {}
    for name, given in inputs.items():
        if isinstance(given, torch.Tensor):
            placed[name] = given
            continue
        assert isinstance(given, np.ndarray)
        placed[name] = HostBytes(mapped, TensorType(str(given.dtype), given.shape), at)
        mapped[at : at + given.nbytes] = torch.tensor(list(given.tobytes()), dtype=torch.uint8)
        at += -(-given.nbytes // 256) * 256
    (joined,) = join([Step("", options, placed, HostBytes(mapped, out, 2**20 + at))], None)
    return joined


def run(solo: Solo, joined: Joined) -> np.ndarray:
    solo.copy_in(joined)
    solo.compute(joined)
    solo.copy_out(joined)
    return tensor_of(joined.outs[0]).numpy().copy()


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("at", [0, 4096])
def test_a_second_request_of_a_kind_is_prepared_and_each_gets_its_own_result(mapped, solos, width, at):
    """Rows of 7 are padded on the device, and are not where they come from."""
    rng = np.random.default_rng(width)
    w = torch.from_numpy(rng.integers(-4, 4, (5, width)).astype(np.float32))
    out = TensorType("float32", (3, width))
    for number in range(4):
        a = rng.integers(-4, 4, (3, 5)).astype(np.float32)
        joined = request(mapped, MatmulOptions(), out, at + 512 * number, a=a, b=w)
        solo = solos.find([joined])
        assert (solo is None) == (number == 0)
        if solo is not None:
            np.testing.assert_array_equal(run(solo, joined), a @ w.numpy())


def test_every_op_and_option(mapped, solos):
    rng = np.random.default_rng(1)
    a, b, x = (rng.integers(-4, 4, shape).astype(np.float32) for shape in ((6, 3), (4, 6), (2, 9)))
    bias = torch.arange(4, dtype=torch.float32)
    shifted = np.exp(x.astype(np.float64) - x.max(0))
    cases: list[tuple[Options, dict[str, object], np.ndarray]] = [
        (MatmulOptions(transpose_a=True, transpose_b=True), {"a": a, "b": b, "bias": bias}, a.T @ b.T + bias.numpy()),
        (MatmulOptions(activation="relu"), {"a": b, "b": a}, np.maximum(b @ a, 0)),
        (SoftmaxOptions(axis=0), {"x": x}, shifted / shifted.sum(0)),
        (AddOptions(alpha=3), {"a": x, "b": x}, 4 * x),
    ]
    for options, inputs, expected in cases:
        joined = request(mapped, options, TensorType("float32", expected.shape), 0, **inputs)
        assert solos.find([joined]) is None
        solo = solos.find([joined])
        assert solo is not None
        np.testing.assert_allclose(run(solo, joined), expected, rtol=1e-6)


def test_a_replaced_resident_is_used_and_the_old_one_is_not_kept(mapped, solos):
    a = np.ones((2, 4), np.float32)
    out = TensorType("float32", (2, 3))
    for factor in (1, 5):
        w = torch.full((4, 3), float(factor))
        joined = request(mapped, MatmulOptions(), out, 0, a=a, b=w)
        solos.find([joined])
        solo = solos.find([joined])
        assert solo is not None
        np.testing.assert_array_equal(run(solo, joined), np.full((2, 3), 4.0 * factor))
    other = torch.full((4, 3), 7.0)
    assert not solo.fits(request(mapped, MatmulOptions(), out, 0, a=a, b=other))


def test_what_is_busy_large_several_or_empty_goes_the_general_way(mapped, solos):
    x = np.ones((2, 4), np.float32)
    out = TensorType("float32", (2, 4))
    joined = request(mapped, SoftmaxOptions(), out, 0, x=x)
    solos.find([joined])
    solo = solos.find([joined])
    assert solo is not None
    solo.is_busy = True
    assert solos.find([joined]) is None
    solo.is_busy = False
    assert solos.find([joined]) is solo
    assert solos.find([joined, joined]) is None
    large = request(mapped, SoftmaxOptions(), TensorType("float32", (MOST_BYTES // 4,)), 0, x=x)
    empty = request(mapped, MatmulOptions(), out, 0, a=np.ones((2, 0), np.float32), b=np.ones((0, 4), np.float32))
    for one in (large, empty):
        assert [solos.find([one]) for _ in range(3)] == [None] * 3


def test_memory_that_the_device_does_not_reach_goes_the_general_way(mapped, solos):
    elsewhere = torch.zeros(4096, dtype=torch.uint8)
    joined = request(elsewhere.repeat(512), SoftmaxOptions(), TensorType("float32", (4,)), 0, x=np.ones(4, np.float32))
    assert [solos.find([joined]) for _ in range(3)] == [None] * 3

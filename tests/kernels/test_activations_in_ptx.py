"""Activations as text in PTX, against the fp64 oracle: no GPU of CI runs it, so its few instructions are run here."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.float64_oracle import ACTIVATIONS as EXPECTED
from tilewire.kernels.matmul.configs import ACTIVATIONS
from tilewire.kernels.matmul.epilogue import ptx_of_activations

POSITIVE = [0.0, 1e-30, 1e-3, 0.2, 0.249, 0.251, 0.7, 1.0, 3.0, 9.0, 30.0, 60.0, 1e20, np.inf, np.nan]
NUMBERS = np.array([*POSITIVE, *(-x for x in POSITIVE)], np.float32)

INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "mov.f32": lambda a: a,
    "add.f32": np.add,
    "mul.f32": np.multiply,
    "fma.rn.f32": lambda a, b, c: (np.float64(a) * b + c).astype(np.float32),
    "max.NaN.f32": np.maximum,
    "ex2.approx.ftz.f32": np.exp2,
    "rcp.approx.ftz.f32": np.reciprocal,
    "setp.eq.s32": lambda a, b: a == int(b),
    "setp.lt.f32": np.less,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
}


def run(text: str, operands: list[Any]) -> list[Any]:
    """Runs a text as one thread does, for many numbers at a time."""
    lines = text.strip("{ }").replace(":", ":;").split(";")
    lines = [line.strip() for line in lines if line.strip() and ".reg" not in line]
    values = {f"${place}": operand for place, operand in enumerate(operands)}
    at = 0
    while at < len(lines):
        words = lines[at].replace(",", " ").split()
        at += 1
        if words[0] == "@p":
            words = words[1:] if values["p"] else [":"]
        if words[0] == "bra.uni":
            at = lines.index(f"{words[1]}:")
        elif not words[0].endswith(":"):
            name, to, *names = words
            values[to] = INSTRUCTIONS[name](*(values[one] if one in values else constant(one) for one in names))
    return [values[f"${place}"] for place in range(len(operands))]


def constant(text: str) -> Any:
    return np.float32(struct.unpack(">f", bytes.fromhex(text[2:]))[0]) if text.startswith("0f") else text


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "none"])
def test_the_text_activates_every_element(name):
    text, _ = ptx_of_activations(2)
    number = ACTIVATIONS.index(name)
    elements = [NUMBERS, NUMBERS[::-1]]
    first, second, *_ = run(text, [*elements, *elements, number, number])
    expected = EXPECTED[name](np.float64(NUMBERS))
    np.testing.assert_allclose(first, expected, rtol=2e-5, atol=1e-14 if name == "gelu" else 1e-34)
    np.testing.assert_array_equal(second, first[::-1])


def test_operands_are_the_elements_in_place_and_the_number_for_each():
    _, constraints = ptx_of_activations(3)
    assert constraints == "=f,=f,=f,0,1,2,r,r,r"

"""The fp64 oracle of pointwise. Torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch

_UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "log": torch.log,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "abs": torch.abs,
    "neg": torch.neg,
}
_BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": torch.mul,
    "sub": torch.sub,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


def pointwise_reference(
    x: torch.Tensor, fn: str, *, y: torch.Tensor | None = None, scale: float = 1.0, shift: float = 0.0
) -> torch.Tensor:
    """The function `fn`, times `scale`, plus `shift`, in float64."""
    result = _UNARY[fn](x.double()) if y is None else _BINARY[fn](x.double(), y.double())
    return result * scale + shift

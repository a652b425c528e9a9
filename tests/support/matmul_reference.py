"""The fp64 oracle of matmul. Torch on the CPU or a GPU; no Triton."""

from __future__ import annotations

from collections.abc import Callable

import torch

_SLOPE = 0.01


def matmul_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    activation: str = "none",
) -> torch.Tensor:
    """act((a @ b) * a_scale * b_scale + bias) in float64, on operands that are already transposed.

    Args:
        a: (…, M, K), any dtype.
        b: (…, K, N), any dtype.
        bias: (N,).
        a_scale: 1 or M elements.
        b_scale: 1 or N elements.
        activation: one of `ACTIVATIONS`.

    Returns:
        (…, M, N), float64.
    """
    out = torch.matmul(a.double(), b.double())
    if a_scale is not None:
        out = out * a_scale.double().reshape(-1, 1)
    if b_scale is not None:
        out = out * b_scale.double().reshape(1, -1)
    if bias is not None:
        out = out + bias.double()
    return _ACTIVATE[activation](out)


_ACTIVATE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": torch.Tensor.clone,
    "relu": torch.relu,
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, _SLOPE),
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

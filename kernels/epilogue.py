# mypy: ignore-errors
"""What happens to an accumulator between the product and the store: scales, bias, activation. Jit functions only.

Their bodies are Triton's language, so mypy leaves them out, as it does the `kernel.py` files.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); saturates to 0 and 1 without overflow trouble because 1/inf is 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent to fp32 accuracy.

    Away from zero 1 - 2/(e^2|x| + 1); near zero, where that cancels, the odd Taylor polynomial to x^9.
    """
    magnitude = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    square = x * x
    series = -0.05396825396825397 + square * 0.021869488536155203
    series = 0.13333333333333333 + square * series
    series = -0.3333333333333333 + square * series
    near = magnitude + magnitude * square * series
    result = tl.where(magnitude < 0.25, near, far)
    return tl.where(x < 0, -result, result)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the activation named by ACTIVATION to `x` in its own precision; NaN stays NaN."""
    if ACTIVATION == "relu":
        # A comparison, not maximum(): NaN must pass through, as in PyTorch.
        x = tl.where(x < 0, 0, x)
    elif ACTIVATION == "leaky_relu":
        x = tl.where(x < 0, 0.01 * x, x)
    elif ACTIVATION == "gelu":
        # 0.5 (1 + tanh u) is sigmoid(2u).
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    elif ACTIVATION == "sigmoid":
        x = sigmoid(x)
    elif ACTIVATION == "tanh":
        x = tanh(x)
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
    return x


@triton.jit
def finish(
    acc,
    offs_m,
    offs_n,
    m,
    n,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    HAS_BIAS: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_SCALE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OUT_TYPE: tl.constexpr,
):
    """act(acc * a_scale * b_scale + bias), cast to OUT_TYPE.

    `acc` is (BLOCK_M, BLOCK_N) for rows `offs_m` and columns `offs_n`. A_SCALE and B_SCALE say how many scales there
    are: 0 none, 1 one for all, 2 one for each row (a) or column (b). An int32 result stays in integers.
    """
    if tl.int32 != OUT_TYPE:
        acc = acc.to(tl.float32)
    if A_SCALE == 1:
        acc = acc * tl.load(a_scale_ptr)
    elif A_SCALE == 2:
        acc = acc * tl.load(a_scale_ptr + offs_m, mask=offs_m < m, other=0.0)[:, None]
    if B_SCALE == 1:
        acc = acc * tl.load(b_scale_ptr)
    elif B_SCALE == 2:
        acc = acc * tl.load(b_scale_ptr + offs_n, mask=offs_n < n, other=0.0)[None, :]
    if HAS_BIAS:
        acc = acc + tl.load(bias_ptr + offs_n, mask=offs_n < n, other=0).to(acc.dtype)[None, :]
    return activate(acc, ACTIVATION).to(OUT_TYPE)

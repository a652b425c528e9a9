# mypy: ignore-errors
"""Reading elements whose type is passed at run time, so that no binary is needed for each. Jit functions only."""

import triton
import triton.language as tl

# As in `kernels.runtime.kinds`.
FLOAT16 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT32 = tl.constexpr(3)
INT32 = tl.constexpr(4)


@triton.jit
def load_floats(ptr, kind, offs, mask):
    """Elements `offs` of the array of `kind` at the byte pointer `ptr`, in float32; zeros where `mask` is not set."""
    if kind <= BFLOAT16:
        short = tl.load(ptr.to(tl.pointer_type(tl.int16)) + offs, mask=mask, other=0)
        as_bfloat16 = (short.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        floats = tl.where(kind == FLOAT16, short.to(tl.float16, bitcast=True).to(tl.float32), as_bfloat16)
    else:
        word = tl.load(ptr.to(tl.pointer_type(tl.int32)) + offs, mask=mask, other=0)
        floats = tl.where(kind == FLOAT32, word.to(tl.float32, bitcast=True), word.to(tl.float32))
    return floats

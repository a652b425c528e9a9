# mypy: ignore-errors
"""Elements whose type is passed at run time, so that no binary is needed for each, and their numbers. Jit functions only."""

import triton
import triton.language as tl

# As in `kernels.runtime.kinds`.
FLOAT16 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
FLOAT32 = tl.constexpr(3)
INT32 = tl.constexpr(4)


@triton.jit
def floats_of_short(kind, bits):
    """Numbers of `kind` FLOAT16 or BFLOAT16 from their 16 bits, in float32."""
    as_bfloat16 = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return tl.where(kind == FLOAT16, bits.to(tl.float16, bitcast=True).to(tl.float32), as_bfloat16)


@triton.jit
def floats_of_word(kind, bits):
    """Numbers of `kind` FLOAT32 or INT32 from their 32 bits, in float32."""
    return tl.where(kind == FLOAT32, bits.to(tl.float32, bitcast=True), bits.to(tl.float32))


@triton.jit
def load_bits(ptr, kind, offs, mask):
    """Elements `offs` of the array of `kind` at the byte pointer `ptr`: (their 16 bits, 0) or (0, their 32 bits).

    Zeros where `mask` is not set. Unlike `load_floats` it neither branches nor waits; see `floats_of_bits`.
    """
    short = tl.load(ptr.to(tl.pointer_type(tl.int16)) + offs, mask=mask & (kind <= BFLOAT16), other=0)
    word = tl.load(ptr.to(tl.pointer_type(tl.int32)) + offs, mask=mask & (kind > BFLOAT16), other=0)
    return short, word


@triton.jit
def floats_of_bits(kind, bits):
    """Converts the bits that `load_bits` loaded to float32."""
    short, word = bits
    return tl.where(kind <= BFLOAT16, floats_of_short(kind, short), floats_of_word(kind, word))


@triton.jit
def load_floats(ptr, kind, offs, mask):
    """Elements `offs` of the array of `kind` at the byte pointer `ptr`, in float32; zeros where `mask` is not set."""
    if kind <= BFLOAT16:
        floats = floats_of_short(kind, tl.load(ptr.to(tl.pointer_type(tl.int16)) + offs, mask=mask, other=0))
    else:
        floats = floats_of_word(kind, tl.load(ptr.to(tl.pointer_type(tl.int32)) + offs, mask=mask, other=0))
    return floats


@triton.jit
def store_floats(ptr, kind, offs, value, mask):
    """Store float32 `value` at elements `offs` of the array of `kind`, no INT32, at the byte pointer `ptr`."""
    if kind == FLOAT16:
        tl.store(ptr.to(tl.pointer_type(tl.float16)) + offs, value.to(tl.float16), mask=mask)
    elif kind == BFLOAT16:
        tl.store(ptr.to(tl.pointer_type(tl.bfloat16)) + offs, value.to(tl.bfloat16), mask=mask)
    else:
        tl.store(ptr.to(tl.pointer_type(tl.float32)) + offs, value, mask=mask)


@triton.jit
def wrapped(at, extent, MOST: tl.constexpr):
    """Returns how often the places `at` contain `extent`, and where within it they are; they are below `extent` + MOST.

    An extent of MOST or more is contained once at most: that takes a comparison. A smaller one takes a product in float32,
    which is off by less than 1/2 of a place. MOST is 65,536 at most.
    """
    small = ((at.to(tl.int32).to(tl.float32) + 0.5) * (1.0 / tl.cast(extent, tl.float32))).to(tl.int32)
    times = tl.where(extent < MOST, small, (at >= extent).to(tl.int32))
    return times, at - times * extent

"""Binaries of kernels whose arguments follow common names."""

from __future__ import annotations

from typing import Any

from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target

# Operands that kernels read in words of 16 bytes where they are aligned.
OPERANDS = ("x_ptr", "a_ptr", "b_ptr")
# Arrays in scratch memory, which begin at multiples of 16 bytes.
_SCRATCH = {"orders_ptr": "*i32", "keys_ptr": "*i64", "merged_ptr": "*i64"}


def binary(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    target: Target,
    aligned: tuple[str, ...] = OPERANDS,
    **options: Any,
) -> Variant:
    """Puts a binary together: sizes are int32, strides int64, scratch orders, keys and indices have fixed types.

    Args:
        kernel: The `@triton.jit` function.
        types: Types of its other arguments, by name.
        constants: Values by name; those that the kernel does not take are left out. A UNIT above 1 promises that
            `aligned` start at multiples of 16 bytes.
        num_warps: Warps of a program.
        target: Device that it is compiled for.
        aligned: Operands that a UNIT above 1 speaks of.
        **options: Further options of the compiler.
    """
    names = kernel.arg_names
    strides = {name: "i64" for name in names if name.startswith("stride_")}
    types = dict.fromkeys(names, "i32") | strides | _SCRATCH | {"indices_ptr": "*i64"} | types
    constants = {**constants, "OVERLAP": target.has_overlap}
    divisible = [name for name in _SCRATCH if name in names and types[name] == _SCRATCH[name]]
    if constants.get("UNIT", 1) > 1:
        divisible += [name for name in aligned if name in names]
    compiler = {"num_warps": num_warps, **options} | ({"launch_pdl": True} if target.has_overlap else {})
    return Variant(
        kernel,
        tuple((name, types[name]) for name in names if name not in constants),
        tuple((name, constants[name]) for name in names if name in constants),
        tuple(divisible),
        tuple(compiler.items()),
    )

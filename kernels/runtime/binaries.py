"""Binaries of kernels whose arguments follow common names."""

from __future__ import annotations

from typing import Any

from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target

# Operands that kernels read in words of 16 bytes where they are aligned.
OPERANDS = ("x_ptr", "a_ptr", "b_ptr")
# Arrays in scratch memory, which begin at multiples of 16 bytes.
_SCRATCH = {"orders_ptr": "*i32", "keys_ptr": "*i64"}


def binary(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    num_warps: int,
    target: Target,
    aligned: tuple[str, ...] | None = None,
    **options: Any,
) -> Variant:
    """Puts a binary together: sizes are int32, strides int64, scratch orders, keys and indices have fixed types.

    Args:
        kernel: The `@triton.jit` or `@gluon.jit` function.
        types: Types of its other arguments, by name.
        constants: Values by name; those that the kernel does not take are left out.
        num_warps: Warps of a program.
        target: Device that it is compiled for.
        aligned: Operands that start at multiples of 16 bytes; by default `OPERANDS` where there is a UNIT above 1.
        **options: Further options of the compiler.
    """
    names = kernel.arg_names
    strides = {name: "i64" for name in names if name.startswith("stride_")}
    types = dict.fromkeys(names, "i32") | strides | _SCRATCH | {"indices_ptr": "*i64"} | types
    constants = {"OVERLAP": target.has_overlap, "IN_PTX": target.backend == "cuda"} | constants
    divisible = [name for name in _SCRATCH if name in names and types[name] == _SCRATCH[name]]
    if aligned is None:
        aligned = OPERANDS if constants.get("UNIT", 1) > 1 else ()
    divisible += [name for name in aligned if name in names]
    compiler = {"num_warps": num_warps, **options} | ({"launch_pdl": True} if constants["OVERLAP"] else {})
    return Variant(
        kernel,
        tuple((name, types[name]) for name in names if name not in constants),
        tuple((name, constants[name]) for name in names if name in constants),
        tuple(divisible),
        tuple(compiler.items()),
    )

"""Reports a target's binaries in words and numbers. Compiles and launches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilewire.kernels.op import TableEntry
from tilewire.kernels.registry import KERNEL_OPS
from tilewire.kernels.runtime.launch import Loaded, Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.catalogue import op_named, variants
from tilewire.kernels.selection.tables import is_tuned, table_for

# Constants that say how a binary computes; the others, what.
_BLOCKS = frozenset({"BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_ROWS", "GROUP_M", "HALVES", "FLATTEN", "IS_SWAPPED"})


@dataclass(frozen=True)
class Described:
    """One binary of the catalogue.

    Attributes:
        op: that launches it.
        kernel: name of the Triton function.
        config: block sizes and compiler options by name.
        signature: argument types and the other constants.
        source: `tuned` where the target has a table of its own, else `heuristic`.
        registers: of each thread; None while it is not loaded.
        spills: registers of each thread that lie in memory; None likewise.
        shared_bytes: shared memory of a program; None likewise.
    """

    op: str
    kernel: str
    config: dict[str, int | bool | str]
    signature: str
    source: str
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None


def described(target: Target, loaded: Mapping[Variant, Loaded]) -> list[Described]:
    """Every binary of `target`, with what is known of those in `loaded`."""
    source = "tuned" if is_tuned(target) else "heuristic"
    return [_describe(variant, loaded.get(variant), source) for variant in variants(target)]


def _describe(variant: Variant, loaded: Loaded | None, source: str) -> Described:
    name = variant.kernel.__name__
    blocks = {name.lower(): value for name, value in variant.constants if name in _BLOCKS}
    others = [f"{name}={value}" for name, value in variant.constants if name not in _BLOCKS]
    types = [f"{name}: {kind}" for name, kind in variant.signature]
    return Described(
        op_named(name),
        name,
        blocks | dict(variant.options),
        ", ".join([*types, *others]),
        source,
        None if loaded is None else loaded.registers,
        None if loaded is None else loaded.spills,
        None if loaded is None else loaded.shared_bytes,
    )


def tuned(target: Target) -> list[TableEntry]:
    """Returns the table entries of the device that `target` names; empty without a table."""
    if not is_tuned(target):
        return []
    table = table_for(target)
    return [entry for op in KERNEL_OPS for entry in op.table_entries(table.get(op.name, {}))]


def roofline(target: Target) -> dict[str, Any] | None:
    """`bandwidth_bytes_per_second` and `tflops` by dtype, as measured on the device; None when nothing was."""
    found = table_for(target).get("roofline") if is_tuned(target) else None
    return None if found is None else dict(found)

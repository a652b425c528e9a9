"""What a target's binaries are, in words and numbers, for people and dashboards. Compiles and launches nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tilewire.kernels.runtime.launch import Loaded, Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.catalogue import op_of, variants
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


@dataclass(frozen=True)
class Tuned:
    """One measured entry of a target's table.

    Attributes:
        op: that it is for.
        key: where in the table it stands: arithmetic or bytes of an element, and what selects it.
        config: of the kernel, in words.
        figure: what was measured; None for an entry that only states a choice.
        unit: of the figure.
    """

    op: str
    key: str
    config: str
    figure: float | None = None
    unit: str = ""


def described(target: Target, loaded: Mapping[Variant, Loaded]) -> list[Described]:
    """Every binary of `target`, with what is known of those in `loaded`."""
    source = "tuned" if is_tuned(target) else "heuristic"
    return [_describe(variant, loaded.get(variant), source) for variant in variants(target)]


def _describe(variant: Variant, loaded: Loaded | None, source: str) -> Described:
    blocks = {name.lower(): value for name, value in variant.constants if name in _BLOCKS}
    others = [f"{name}={value}" for name, value in variant.constants if name not in _BLOCKS]
    types = [f"{name}: {kind}" for name, kind in variant.signature]
    return Described(
        op_of(variant),
        variant.kernel.__name__,
        blocks | dict(variant.options),
        ", ".join([*types, *others]),
        source,
        None if loaded is None else loaded.registers,
        None if loaded is None else loaded.spills,
        None if loaded is None else loaded.shared_bytes,
    )


def tuned(target: Target) -> list[Tuned]:
    """What was measured on the very device that `target` names; empty for a device without a table."""
    if not is_tuned(target):
        return []
    table = table_for(target)
    return [*_products(table.get("matmul", {})), *_softmaxes(table.get("softmax", {})), *_sums(table.get("add", ()))]


def roofline(target: Target) -> dict[str, Any] | None:
    """`bandwidth_bytes_per_second` and `tflops` by dtype, as measured on the device; None when nothing was."""
    found = table_for(target).get("roofline") if is_tuned(target) else None
    return None if found is None else dict(found)


def _products(table: Mapping[str, Any]) -> Iterator[Tuned]:
    for arithmetic, entries in table.get("tiles", {}).items():
        for entry in entries:
            step_us = entry.get("step_us", (None,))[-1]
            yield Tuned("matmul", arithmetic, _blocks_of(entry), step_us, "us per step of K")
    for arithmetic, entries in table.get("few_rows", {}).items():
        for entry in entries:
            yield Tuned("matmul", f"{arithmetic}, up to {entry['max_m']} rows", _blocks_of(entry))


def _blocks_of(entry: Mapping[str, Any]) -> str:
    blocks = "x".join(str(entry[name]) for name in ("block_m", "block_n", "block_k"))
    return f"{entry['kernel']} {blocks}, {entry['num_warps']} warps, {entry['num_stages']} stages"


def _softmaxes(table: Mapping[str, Any]) -> Iterator[Tuned]:
    for key, entries in table.get("rows", {}).items():
        for entry in entries:
            config = f"{entry['block_rows']} rows, {entry['num_warps']} warps"
            yield Tuned("softmax", f"{_reading(key)}, up to {entry['block_n']} elements", config)
    for key, entry in table.get("team", {}).items():
        if entry is not None:
            config = f"{entry['block_n']} elements a program, {entry['num_warps']} warps"
            yield Tuned("softmax", f"{_reading(key)}, longer rows", config)


def _reading(key: str) -> str:
    """A key of softmax's entries in words: bytes of an element, and whether it is read alone."""
    item_bytes, _, alone = key.partition(" ")
    return f"{item_bytes} bytes{' by elements' if alone else ''}"


def _sums(entries: Any) -> Iterator[Tuned]:
    for entry in entries:
        most = "more" if entry["max_n"] is None else f"up to {entry['max_n']} elements"
        yield Tuned("add", most, f"{entry['num_warps']} warps, {entry['vectors']} pieces of 16 bytes a thread")

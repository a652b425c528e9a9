"""The softmax op."""

from collections.abc import Iterator, Mapping
from typing import Any

from tilewire.kernels.op import KernelOp, TableEntry
from tilewire.kernels.softmax.bench import SoftmaxOperands
from tilewire.kernels.softmax.op import prepare_softmax, softmax
from tilewire.kernels.softmax.selftest import trials
from tilewire.kernels.softmax.shape import SoftmaxShape, draw
from tilewire.kernels.softmax.variants import KERNELS, variants


def _table_entries(section: Mapping[str, Any]) -> Iterator[TableEntry]:
    for key, entries in section.get("rows", {}).items():
        for entry in entries:
            config = f"{entry['block_rows']} rows, {entry['num_warps']} warps"
            yield TableEntry("softmax", f"{_reading(key)}, up to {entry['block_n']} elements", config)
    for key, entry in section.get("team", {}).items():
        if entry is not None:
            config = f"{entry['block_n']} elements a program, {entry['num_warps']} warps"
            yield TableEntry("softmax", f"{_reading(key)}, longer rows", config)


def _reading(key: str) -> str:
    """A key of the entries in words: bytes of an element, and whether it is read alone."""
    item_bytes, _, alone = key.partition(" ")
    return f"{item_bytes} bytes{' by elements' if alone else ''}"


SOFTMAX = KernelOp(
    name="softmax",
    run=softmax,
    prepare=prepare_softmax,
    kernels=tuple(kernel for kernels in KERNELS.values() for kernel in kernels),
    variants=variants,
    trials=trials,
    shape=SoftmaxShape,
    draw=draw,
    operands=SoftmaxOperands,
    table_entries=_table_entries,
)

"""The matmul op, and products of unequal shape in one launch."""

from collections.abc import Iterator, Mapping
from typing import Any

from tilewire.kernels.matmul.bench import MatmulOperands
from tilewire.kernels.matmul.grouped.kernel import matmul_grouped_kernel
from tilewire.kernels.matmul.grouped.op import variants as grouped_variants
from tilewire.kernels.matmul.kernel import matmul_kernel, matmul_tma_kernel
from tilewire.kernels.matmul.op import matmul, prepare_matmul
from tilewire.kernels.matmul.selftest import trials
from tilewire.kernels.matmul.shape import MatmulShape, draw
from tilewire.kernels.matmul.variants import variants
from tilewire.kernels.op import KernelOp, TableEntry


def _table_entries(section: Mapping[str, Any]) -> Iterator[TableEntry]:
    for arithmetic, entries in section.get("tiles", {}).items():
        for entry in entries:
            step_us = entry.get("step_us", (None,))[-1]
            yield TableEntry("matmul", arithmetic, _blocks_of(entry), step_us, "us per step of K")
    for arithmetic, entries in section.get("few_rows", {}).items():
        for entry in entries:
            yield TableEntry("matmul", f"{arithmetic}, up to {entry['max_m']} rows", _blocks_of(entry))


def _blocks_of(entry: Mapping[str, Any]) -> str:
    blocks = "x".join(str(entry[name]) for name in ("block_m", "block_n", "block_k"))
    return f"{entry['kernel']} {blocks}, {entry['num_warps']} warps, {entry['num_stages']} stages"


MATMUL = KernelOp(
    name="matmul",
    run=matmul,
    prepare=prepare_matmul,
    kernels=(matmul_kernel, matmul_tma_kernel, matmul_grouped_kernel),
    variants=lambda target: [*variants(target), *grouped_variants(target)],
    trials=trials,
    shape=MatmulShape,
    draw=draw,
    operands=MatmulOperands,
    table_entries=_table_entries,
)

"""The matmul op, and products of unequal shape in one launch."""

from collections.abc import Iterator, Mapping
from typing import Any

from tilewire.kernels.matmul.bench import MatmulOperands
from tilewire.kernels.matmul.configs import resolved
from tilewire.kernels.matmul.grouped.op import GroupKind
from tilewire.kernels.matmul.grouped.op import members as grouped_members
from tilewire.kernels.matmul.members import members
from tilewire.kernels.matmul.select import explain
from tilewire.kernels.matmul.selftest import grouped_self_test, self_test
from tilewire.kernels.matmul.shape import GROUPS, MatmulShape
from tilewire.kernels.matmul.space import TUNING, binaries
from tilewire.kernels.matmul.variants import build
from tilewire.kernels.op import Family, KernelOp, TableEntry


def _table_entries(section: Mapping[str, Any]) -> Iterator[TableEntry]:
    for key, tiles in section.items():
        for entry in tiles["tiles"]:
            factor = entry.get("costs", {}).get("matrix")
            yield TableEntry(
                "matmul", key, _words_of(entry), factor, "times the matrix units' full rate" if factor else ""
            )


def _words_of(entry: Mapping[str, Any]) -> str:
    blocks = "x".join(str(entry[name]) for name in ("block_m", "block_n", "block_k"))
    return f"{entry['kernel']} {blocks}, {entry.get('num_warps', 4)} warps, {entry.get('num_stages', 3)} stages"


MATMUL = KernelOp(
    name="matmul",
    families=(
        Family(members, build, self_test),
        Family(grouped_members, GroupKind.variant, grouped_self_test),
    ),
    shape=MatmulShape,
    binaries=binaries,
    groups=GROUPS,
    operands=MatmulOperands,
    tuning=TUNING,
    explain=lambda shape, target: explain(resolved(shape.problem, target), target, is_plain=shape.is_plain),
    table_entries=_table_entries,
)

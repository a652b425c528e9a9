"""The softmax op."""

from collections.abc import Iterator, Mapping
from typing import Any

from tilewire.kernels.op import Family, KernelOp, TableEntry
from tilewire.kernels.softmax.bench import GROUPS, TUNING, SoftmaxOperands, SoftmaxShape, binaries_of
from tilewire.kernels.softmax.configs import explain, members
from tilewire.kernels.softmax.op import binaries, self_test


def _table_entries(section: Mapping[str, Any]) -> Iterator[TableEntry]:
    for key, tiles in section.items():
        item_bytes, _, alone = key.partition(" ")
        for entry in tiles["tiles"]:
            config = f"{entry['kernel']} {entry['block_rows']}x{entry['block_n']}, {entry['num_warps']} warps"
            yield TableEntry("softmax", f"{item_bytes} bytes{' by elements' if alone else ''}", config)


SOFTMAX = KernelOp(
    name="softmax",
    families=(Family(members, binaries, self_test),),
    shape=SoftmaxShape,
    binaries=binaries_of,
    groups=GROUPS,
    operands=SoftmaxOperands,
    tuning=TUNING,
    explain=lambda shape, target: explain(shape.problem, target),
    table_entries=_table_entries,
)

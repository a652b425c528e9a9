"""The add op: a + alpha * b with broadcasting."""

from collections.abc import Iterator, Sequence
from typing import Any

from tilewire.kernels.add.bench import GROUPS, AddOperands, AddShape
from tilewire.kernels.add.op import build, members, self_test
from tilewire.kernels.op import Family, KernelOp, TableEntry


def _table_entries(section: Sequence[dict[str, Any]]) -> Iterator[TableEntry]:
    for entry in section:
        key = "more" if entry["max_n"] is None else f"up to {entry['max_n']} elements"
        yield TableEntry("add", key, f"{entry['num_warps']} warps, {entry['vectors']} pieces of 16 bytes a thread")


ADD = KernelOp(
    name="add",
    families=(Family(members, build, self_test),),
    shape=AddShape,
    binaries=lambda shape, config, target: (build(shape.problem.specialization, config, target),),
    groups=GROUPS,
    operands=AddOperands,
    table_entries=_table_entries,
)

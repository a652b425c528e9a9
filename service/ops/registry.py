"""The ops that are served, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

from tilewire.service.errors import UnknownName
from tilewire.service.ops.add import Add
from tilewire.service.ops.matmul import Matmul
from tilewire.service.ops.merge import MERGE, Merge
from tilewire.service.ops.normalize import Normalize
from tilewire.service.ops.op import AnyOp, OpOptions
from tilewire.service.ops.pointwise import Pointwise
from tilewire.service.ops.program.op import PROGRAM, ProgramFamily
from tilewire.service.ops.reduce import Reduce
from tilewire.service.ops.search import Search
from tilewire.service.ops.softmax import Softmax
from tilewire.service.ops.topk import Topk

OPS: Mapping[str, AnyOp] = {
    op.name: op for op in (Matmul(), Softmax(), Add(), Normalize(), Reduce(), Pointwise(), Topk(), Search())
}
# A request of this op carries its steps, which are ops of `OPS`.
PROGRAM_FAMILY = ProgramFamily(OPS)
# A gateway sends this op when a request was computed in parts.
MERGE_OP = Merge()

if TYPE_CHECKING:
    Options = OpOptions
else:
    # msgspec decodes a message's options by their tag, which needs the union of all classes.
    Options = Union[tuple(op.options for op in (*OPS.values(), PROGRAM_FAMILY, MERGE_OP))]  # noqa: UP007  (made from a tuple)


def program_resident(name: str) -> str:
    """Returns the name of the resident that holds a program's text; no tensor of a client can have it."""
    return f"{PROGRAM}:{name}"


def program_of(resident: str) -> str:
    """Returns the name of the program whose text a resident holds; empty for a tensor."""
    return resident.removeprefix(program_resident("")) if is_program(resident) else ""


def is_program(resident: str) -> bool:
    """Whether a resident of this name holds a program's text."""
    return resident.startswith(program_resident(""))


def op_for(name: str, options: OpOptions) -> AnyOp:
    """Returns the op of a message: one of `OPS`, `merge`, or the program that its options carry.

    Raises:
        UnknownName: No such op.
    """
    op: AnyOp = PROGRAM_FAMILY if name == PROGRAM else MERGE_OP if name == MERGE else op_named(name)
    return op.bound(options)


def op_named(name: str) -> AnyOp:
    """Looks an op up by its name.

    Raises:
        UnknownName: No such op.
    """
    op = OPS.get(name)
    if op is None:
        raise UnknownName(f"op: no op {name[:64]!r}; there are {', '.join(OPS)}")
    return op

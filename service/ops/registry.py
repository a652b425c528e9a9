"""The ops that are served, by name: parsing of their options and planning of requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Union

import msgspec

from tilewire.service.errors import BeyondLimit, InvalidRequest, UnknownName
from tilewire.service.ops.add import Add
from tilewire.service.ops.matmul import Matmul
from tilewire.service.ops.op import AnyOp, Limits, OpOptions, Plan, TensorType, check_limits
from tilewire.service.ops.softmax import Softmax

OPS: Mapping[str, AnyOp] = {op.name: op for op in (Matmul(), Softmax(), Add())}

if TYPE_CHECKING:
    Options = OpOptions
else:
    # msgspec decodes a message's options by their tag, which needs the union of all classes.
    Options = Union[tuple(op.options for op in OPS.values())]  # noqa: UP007  (made from a tuple)


def op_named(name: str) -> AnyOp:
    """Looks an op up by its name.

    Raises:
        UnknownName: No such op.
    """
    op = OPS.get(name)
    if op is None:
        raise UnknownName(f"op: no op {name[:64]!r}; there are {', '.join(OPS)}")
    return op


def parse_options(op: AnyOp, raw: Mapping[str, object]) -> Options:
    """Converts option values, as text or as JSON values, into the op's value object.

    Raises:
        InvalidRequest: An unknown option, or a value that is not of its type; the detail names it.
    """
    known = op.options.__struct_fields__
    for name in raw:
        if name not in known:
            raise InvalidRequest(f"{name[:64]}: {op.name} has no such option; it has {', '.join(known)}")
    for name, value in raw.items():
        try:
            msgspec.convert({name: value}, op.options, strict=False)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
            reason = str(error).split(" - at ")[0]
            choices = _choices(op, name)
            expected = f"expected one of {', '.join(choices)}" if choices else reason
            raise InvalidRequest(f"{name}: {expected}; got {str(value)[:64]!r}") from None
    options: Options = msgspec.convert(dict(raw), op.options, strict=False)
    return options


def _choices(op: AnyOp, name: str) -> list[str]:
    """The values that an option may have, when they can be counted up."""
    schema = msgspec.json.schema(op.options)["$defs"][op.options.__name__]["properties"][name]
    return [
        str(value) for part in (schema, *schema.get("anyOf", ())) for value in part.get("enum", ()) if value is not None
    ]


def plan(op: AnyOp, operands: Mapping[str, TensorType], options: Options, limits: Limits) -> Plan:
    """Validates operands against the op and infers the results and the cost.

    Args:
        op: The operation.
        operands: Dtype and shape of each input by name.
        options: Options of the op, as `parse_options` returns them.
        limits: Bounds on the request.

    Raises:
        InvalidRequest: A missing or unknown input, a dtype or a shape that cannot be right.
        BeyondLimit: Rank, elements or result size over the limits.
    """
    for name in op.required:
        if name not in operands:
            raise InvalidRequest(f"{name}: {op.name} needs this input; got {', '.join(operands) or 'none'}")
    for name, operand in operands.items():
        _check_operand(op, name, operand, limits)
    outputs, flops = op.infer(operands, options)
    for name, out in zip(op.outputs, outputs, strict=True):
        if math.prod(dim or 1 for dim in out.shape) > limits.max_elements:
            raise BeyondLimit(f"{name}: {out} has more than {limits.max_elements} elements")
    out_bytes = sum(out.nbytes for out in outputs)
    if out_bytes > limits.max_result_bytes:
        text = ", ".join(map(str, outputs))
        raise BeyondLimit(f"{op.outputs[0]}: {text} is {out_bytes} bytes, over the limit of {limits.max_result_bytes}")
    return Plan(outputs, flops, sum(operand.nbytes for operand in operands.values()) + out_bytes)


def _check_operand(op: AnyOp, name: str, operand: TensorType, limits: Limits) -> None:
    if name not in op.inputs:
        raise InvalidRequest(f"{name[:64]}: {op.name} has no such input; it has {', '.join(op.inputs)}")
    check_limits(name, operand, limits)
    if name in op.required and operand.dtype not in op.dtypes:
        raise InvalidRequest(f"{name}: {op.name} does not take {operand.dtype}; expected one of {', '.join(op.dtypes)}")

"""Parsing of an op's options and planning of a request, for any op."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

import msgspec

from tilewire.service.errors import BeyondLimit, InvalidRequest
from tilewire.service.ops.op import AnyOp, Limits, OpOptions, Plan, TensorType, check_limits


def parse_options(op: AnyOp, raw: Mapping[str, object]) -> OpOptions:
    """Converts option values, as text or as JSON values, into the op's value object.

    Raises:
        InvalidRequest: An unknown option, or a value that is not of its type; the detail names it.
    """
    known = op.options.__struct_fields__
    for name in raw:
        if name not in known:
            raise InvalidRequest(f"{name[:64]}: {op.name} has no such option; it has {', '.join(known) or 'none'}")
    for name, value in raw.items():
        try:
            msgspec.convert({name: value}, op.options, strict=False)
        except (msgspec.ValidationError, OverflowError, UnicodeEncodeError) as error:
            reason = str(error).split(" - at ")[0]
            # Of a wrong type or word; other reasons are those of the options or of numbers.
            is_foreign = ", got `" in reason or reason.startswith("Invalid enum")
            expected = op.expected(name) if is_foreign else reason
            shown = repr(value[:64]) if isinstance(value, str) else json.dumps(value, default=str)[:64]
            raise InvalidRequest(f"{name}: {expected}; got {shown}") from None
    options: OpOptions = msgspec.convert(dict(raw), op.options, strict=False)
    return options


def plan(op: AnyOp, operands: Mapping[str, TensorType], options: OpOptions, limits: Limits) -> Plan:
    """Validates operands against the op and infers the results and the cost.

    Raises:
        InvalidRequest: A missing or unknown input, a dtype or a shape that cannot be right.
        BeyondLimit: Rank, elements or result size over the limits.
    """
    for name in op.required:
        if name not in operands:
            got = [one for one in operands if one in op.given]
            raise InvalidRequest(f"{name}: {op.name} needs this input; got {', '.join(got) or 'none'}")
    for name, operand in operands.items():
        _check_operand(op, name, operand, limits)
    outputs, flops = op.infer(operands, options)
    for name, out in zip(op.outputs, outputs, strict=True):
        if math.prod(dim or 1 for dim in out.shape) > limits.max_elements:
            raise BeyondLimit(f"{name}: {out} has more than {limits.max_elements} elements")
    out_bytes = sum(out.nbytes for out in outputs)
    if out_bytes > limits.max_result_bytes:
        text = ", ".join(map(str, outputs))
        raise BeyondLimit(
            f"{op.outputs[0]}: {text} is {out_bytes} bytes, over {limits.max_result_bytes}, --max-result-bytes"
        )
    return Plan(outputs, flops, sum(operand.nbytes for operand in operands.values()) + out_bytes)


def _check_operand(op: AnyOp, name: str, operand: TensorType, limits: Limits) -> None:
    if name not in op.inputs:
        op.check_given([name])
    check_limits(name, operand, limits)
    if name in op.required and operand.dtype not in op.dtypes:
        raise InvalidRequest(f"{name}: {op.name} does not take {operand.dtype}; expected one of {', '.join(op.dtypes)}")

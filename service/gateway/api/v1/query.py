"""Reads the query of a native call: options, resident operands, `store=` and the deadline."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import parse_qsl

import msgspec

from tilewire.service.errors import InvalidRequest
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.planning import parse_options
from tilewire.service.ops.program.op import PROGRAM, NoOptions
from tilewire.service.ops.registry import Options, op_named
from tilewire.service.placement import AUTO, AXES, PLACEMENTS, Placement
from tilewire.service.tensor_names import problem_of

MAX_PARAMETERS = 64
CACHED_BYTES = 512
MAX_TIMEOUT_MS = 86_400_000
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
NO_PROGRAM = "store: the outputs of a program are answered; keep one with an op of its own"
NO_STORE = "durable: goes with store=@name"


class Query(msgspec.Struct, frozen=True):
    """Parsed query of a native request.

    Attributes:
        options: Option values of the op.
        residents: Names of resident tensors by the input that they stand for.
        store: Name under which the result becomes resident, or None.
        durable: The answer waits for the host copy of the result.
        timeout_ms: It must have started by then, or None.
    """

    options: Options
    residents: Mapping[str, str]
    store: str | None = None
    durable: bool = False
    timeout_ms: float | None = None


def parse_run_query(query: bytes, timeout_header: str | None) -> Query:
    """Reads the query string of a program's run; which inputs there are is not known yet.

    Raises:
        InvalidRequest: A repeated parameter, or a value that cannot be right; the detail names it.
    """
    values = _parameters(query)
    timeout = values.pop("timeout_ms", None)
    if "store" in values:
        raise InvalidRequest(NO_PROGRAM)
    if _parse_flag("durable", values.pop("durable", "false")):
        raise InvalidRequest(NO_STORE)
    return Query(
        NoOptions(),
        {name: resident_name(value, field=name[:64]) for name, value in values.items()},
        timeout_ms=_timeout_of(timeout, timeout_header),
    )


def parse_query(op: AnyOp, query: bytes, timeout_header: str | None) -> Query:
    """Reads a query string, whose `timeout_ms` wins over `X-Timeout-Ms`.

    A client's requests mostly have the same one, so short ones are remembered.

    Raises:
        InvalidRequest: An unknown or repeated parameter, or a value that cannot be right; the detail names it.
    """
    parse = _parse if len(query) <= CACHED_BYTES else _parse.__wrapped__
    return parse(op.name, query, timeout_header)


@lru_cache(maxsize=1024)
def _parse(op_name: str, query: bytes, timeout_header: str | None) -> Query:
    op = op_named(op_name)
    values = _parameters(query)
    store, durable = values.pop("store", None), _parse_flag("durable", values.pop("durable", "false"))
    if durable and store is None:
        raise InvalidRequest(NO_STORE)
    timeout = values.pop("timeout_ms", None)
    residents = {name: resident_name(values.pop(name), field=name) for name in op.inputs if name in values}
    for name in values:
        if name not in op.options.__struct_fields__:
            spoken = ", ".join(
                (*op.options.__struct_fields__, *(f"{name}=@…" for name in op.inputs), "store", "durable", "timeout_ms")
            )
            raise InvalidRequest(f"{name[:64]}: {op.name} has no such option; it takes {spoken}")
    return Query(
        options=parse_options(op, values),
        residents=residents,
        store=None if store is None else check_storable(op, resident_name(store, field="store")),
        durable=durable,
        timeout_ms=_timeout_of(timeout, timeout_header),
    )


def refuse_parameters(query: bytes) -> None:
    """Refuses every parameter of a call that takes none: a condition there would be lost, and the call be done.

    Raises:
        InvalidRequest: There is one.
    """
    for name in _parameters(query):
        raise InvalidRequest(f"{name[:64]}: no parameter is taken here; a condition is the header If-Match")


def parse_placement(query: bytes) -> tuple[Placement | None, int]:
    """Reads the placement of an upload.

    Returns:
        Engines that shall hold it, None for those that suit its size. Axis along which it is cut if it is sharded, 0
        for the one that suits its shape.

    Raises:
        InvalidRequest: Another parameter or value, or given twice.
    """
    values = _parameters(query)
    for name in values.keys() - {"placement", "axis"}:
        raise InvalidRequest(f"{name[:64]}: an upload has no such parameter; it takes placement, axis")
    value, axis = values.get("placement", AUTO), values.get("axis")
    placement = PLACEMENTS.get(value)
    if placement is None and value != AUTO:
        raise InvalidRequest(f"placement: expected {AUTO}, {', '.join(PLACEMENTS)}; got {value[:64]!r}")
    if axis is None:
        return placement, AXES[0] if placement == "shard" else 0
    if axis not in map(str, AXES):
        raise InvalidRequest(f"axis: expected {' or '.join(map(str, AXES))}; got {axis[:64]!r}")
    if placement in ("replicate", "single"):
        raise InvalidRequest(f"axis: goes with placement=shard or {AUTO}; placement is {value}")
    return placement, int(axis)


def resident_name(value: str, *, field: str) -> str:
    """Reads `@name`.

    Raises:
        InvalidRequest: No `@`, or not a name.
    """
    if not value.startswith("@"):
        raise InvalidRequest(f"{field}: expected @ and the name of a resident tensor; got {value[:64]!r}")
    return check_name(value[1:], field=field)


def check_storable(op: AnyOp, name: str) -> str:
    """Refuses to store results under one name that are several.

    Raises:
        InvalidRequest: They are.
    """
    if op.name == PROGRAM:
        raise InvalidRequest(NO_PROGRAM)
    if len(op.outputs) > 1:
        raise InvalidRequest(f"store: {op.name} has the outputs {', '.join(op.outputs)}; one can be stored")
    return name


def check_name(name: str, *, field: str) -> str:
    """Checks the name of a resident tensor.

    Raises:
        InvalidRequest: It has other characters, is too long, or has an empty or `..` segment.
    """
    if (problem := problem_of(name)) is not None:
        raise InvalidRequest(f"{field}: {problem}")
    return name


def _parameters(query: bytes) -> dict[str, str]:
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_PARAMETERS)
    except ValueError:
        raise InvalidRequest(f"query: not UTF-8, or more than {MAX_PARAMETERS} parameters") from None
    values: dict[str, str] = {}
    for name, value in pairs:
        if name in values:
            raise InvalidRequest(f"{name[:64]}: given twice")
        values[name] = value
    return values


def _parse_flag(field: str, value: str) -> bool:
    if value not in ("true", "false"):
        raise InvalidRequest(f"{field}: expected true or false; got {value[:64]!r}")
    return value == "true"


def _timeout_of(parameter: str | None, header: str | None) -> float | None:
    """Returns milliseconds; the parameter wins over the header."""
    if parameter is not None:
        return _parse_timeout("timeout_ms", parameter)
    return None if header is None else _parse_timeout("X-Timeout-Ms", header)


def _parse_timeout(field: str, value: str) -> float:
    timeout_ms = float(value) if _NUMBER.fullmatch(value) else -1.0
    if not 0 < timeout_ms <= MAX_TIMEOUT_MS:
        raise InvalidRequest(f"{field}: expected milliseconds, over 0 and at most {MAX_TIMEOUT_MS}; got {value[:64]!r}")
    return timeout_ms

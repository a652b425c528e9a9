"""The JSON header of an infer request: its grammar, and what is refused.

Stricter than Triton where leniency gives a wrong result in silence: an unknown parameter is refused, because it may be a
mistyped option. Unknown members of the objects are ignored, as clients add their own.

Source: the protocol's texts and its binary, parameters, scheduling and shared-memory extensions, as NVIDIA Triton Inference
Server documents them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tilewire.service.dtypes import BY_OIP
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.api.v1.query import check_name, check_storable, resident_name
from tilewire.service.gateway.api.v2.request import InferRequest, Input, Output, Pending
from tilewire.service.gateway.codecs.json_numbers import Numbers, parse_document, read_numbers
from tilewire.service.gateway.codecs.shapes import check_shape
from tilewire.service.gateway.codecs.strict_json import kind_of, refuse_overflow
from tilewire.service.gateway.request.adapter import Region
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.planning import parse_options
from tilewire.service.ops.registry import Options

WHAT = "inference header"
MAX_TIMEOUT_US = 86_400_000_000
# Largest priority that fits the scheduler's ranks in front of the default.
MAX_PRIORITY = 2**31 - 1
MAX_ID_LETTERS = 1024
_MAX_BYTES = 2**63 - 1

_RESERVED = ("sequence_id", "sequence_start", "sequence_end", "headers")
# Parameters that are not offered, with the values by which clients of NVIDIA's server ask for nothing.
_NOTHING_ASKED: Mapping[str, tuple[object, ...]] = {
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "sequence_end": (False,),
    "classification": (0,),
}
_RESERVED_PREFIX = "triton_"
# Of models with several answers to a request. NVIDIA's clients and load generator send it to all.
_FINAL = "triton_enable_empty_final_response"
_REGION_PARAMETERS = ("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset")
_INPUT_PARAMETERS = ("binary_data_size", "resident", *_REGION_PARAMETERS)
_OUTPUT_PARAMETERS = ("binary_data", *_REGION_PARAMETERS)
_SCALARS = {bool, int, float, str}


def read_header(op: AnyOp, text: bytes) -> InferRequest:
    """Reads the JSON; the inputs are still to be placed.

    Raises:
        InvalidRequest: Anything that cannot be right; the detail names the field.
    """
    whole = parse_document(text, WHAT)
    request = read_document(op, whole.members)
    values = list(_parameters(whole.members, "parameters").values())
    has_infinity = any(one.numbers is not None and one.numbers.has_infinity for one in request.pending)
    if has_infinity or math.inf in values or -math.inf in values:
        refuse_overflow(whole.rest, WHAT)
    return request


def read_document(op: AnyOp, document: Mapping[str, object]) -> InferRequest:
    """Reads a request in the form of the JSON's objects: `id`, `parameters`, `inputs` and `outputs`. Inputs are to be placed.

    Raises:
        InvalidRequest: Anything that cannot be right; the detail names the field.
    """
    parameters = _parameters(document, "parameters")
    inputs = _entries(op, document.get("inputs"), "inputs", op.given)
    pending = tuple(_read_input(name, entry) for name, entry in inputs)
    residents = {name: parameters.pop(name) for name in op.given if name in parameters}
    pending += tuple(_resident_parameter(name, value, pending) for name, value in residents.items())
    default_binary = _flag(parameters.pop("binary_data_output", False), "binary_data_output")
    outputs = _read_outputs(op, document.get("outputs"), default_binary)
    durable = _flag(parameters.pop("durable", False), "durable")
    says_final = _flag(parameters.pop(_FINAL, False), _FINAL)
    if "store" in parameters:
        outputs = _stored(op, outputs, parameters.pop("store"))
    elif durable:
        raise InvalidRequest("durable: goes with store")
    return InferRequest(
        id=_read_id(document.get("id")),
        inputs=(),
        outputs=outputs,
        priority=min(_whole(parameters.pop("priority", 0), "priority"), MAX_PRIORITY),
        timeout_us=min(_whole(parameters.pop("timeout", 0), "timeout"), MAX_TIMEOUT_US),
        options=_read_options(op, parameters),
        durable=durable,
        says_final=says_final,
        pending=pending,
    )


def _read_id(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"id: expected a string; got {kind_of(value)}")
    if value and len(value) > MAX_ID_LETTERS:
        raise InvalidRequest(f"id: {len(value)} characters; at most {MAX_ID_LETTERS} are echoed")
    return value or None


def _read_options(op: AnyOp, parameters: dict[str, object]) -> Options:
    parameters = {name: value for name, value in parameters.items() if not _asks_nothing(name, value)}
    for name in parameters:
        if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
            raise InvalidRequest(f"parameters: {name[:64]!r} is reserved; {op.name} keeps no sequences")
        if name not in op.options.__struct_fields__:
            spoken = ", ".join(
                (*op.options.__struct_fields__, "priority", "timeout", "binary_data_output", "store", "durable")
            )
            raise InvalidRequest(f"parameters: {name[:64]!r} is unknown; {op.name} takes {spoken}")
    asked = parameters.get("out_dtype")
    if isinstance(asked, str) and asked in BY_OIP:
        parameters["out_dtype"] = BY_OIP[asked].name
    return parse_options(op, parameters)


def _asks_nothing(name: str, value: object) -> bool:
    # True and False are numbers to `==`.
    return any(type(value) is type(one) and value == one for one in _NOTHING_ASKED.get(name, ()))


def _read_input(name: str, entry: dict[str, object]) -> Pending:
    parameters = _parameters(entry, f"{name}: parameters", _INPUT_PARAMETERS)
    sources: list[str] = [key for key in ("binary_data_size", "shared_memory_region", "resident") if key in parameters]
    sources += ["data"] if entry.get("data") is not None else []
    if len(sources) != 1:
        raise InvalidRequest(
            f"{name}: expected one of data, binary_data_size, shared_memory_region and resident; "
            f"got {' and '.join(sources) or 'none'}"
        )
    region = _read_region(parameters, name)
    if sources == ["resident"]:
        declared = _read_type(name, entry) if "datatype" in entry or "shape" in entry else None
        return Pending(Input(name, declared, resident=_resident(parameters["resident"], name)))
    kind = _read_type(name, entry)
    if region is not None:
        if region.byte_size != kind.nbytes:
            raise InvalidRequest(f"{name}: shared_memory_byte_size {region.byte_size}; {_spoken(kind)}")
        return Pending(Input(name, kind, region=region))
    if sources == ["data"]:
        return Pending(Input(name, kind), numbers=_read_numbers(name, kind, entry["data"]))
    size = _whole(parameters["binary_data_size"], f"{name}: binary_data_size")
    if size != kind.nbytes:
        raise InvalidRequest(f"{name}: binary_data_size {size}; {_spoken(kind)}")
    return Pending(Input(name, kind), binary_bytes=size)


def _spoken(kind: TensorType) -> str:
    return f"its datatype and shape {list(kind.shape)} make {kind.nbytes} bytes"


def _read_numbers(name: str, kind: TensorType, data: object) -> Numbers:
    if kind.dtype.startswith("float8"):
        raise InvalidRequest(f"{name}: float8 has no numbers in JSON; send it as binary data")
    numbers = read_numbers(f"{name}: data", data, kind.dtype)
    shape = numbers.shape
    if numbers.count != kind.num_elements:
        raise InvalidRequest(
            f"{name}: data holds {numbers.count} numbers; shape {list(kind.shape)} takes {kind.num_elements}"
        )
    if numbers.pieces and shape not in (kind.shape, (numbers.count,), ()):
        raise InvalidRequest(
            f"{name}: data is nested as {list(shape)}; expected a flat list, or shape {list(kind.shape)}"
        )
    return numbers


def _read_type(name: str, entry: Mapping[str, object]) -> TensorType:
    datatype = entry.get("datatype")
    dtype = BY_OIP.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        wrong = repr(datatype[:64]) if isinstance(datatype, str) else kind_of(datatype)
        raise InvalidRequest(f"{name}: datatype {wrong}; expected one of {', '.join(BY_OIP)}")
    return TensorType(dtype.name, check_shape(entry.get("shape"), f"{name}: shape"))


def _resident_parameter(name: str, value: object, pending: tuple[Pending, ...]) -> Pending:
    """`parameters: {"b": "@weights/w1"}`: what clients can say that have no parameters of an input."""
    if any(one.input.name == name for one in pending):
        raise InvalidRequest(f"parameters: {name!r} is given as an input, too")
    if not isinstance(value, str):
        raise InvalidRequest(f"parameters: {name!r}: expected @ and the name of a resident tensor")
    return Pending(Input(name, None, resident=resident_name(value, field=name)))


def _resident(value: object, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}: resident: expected a name; got {kind_of(value)}")
    return check_name(value.removeprefix("@"), field=name)


def _read_outputs(op: AnyOp, value: object, default_binary: bool) -> dict[str, Output]:
    """Reads `outputs`; absent or empty means all outputs."""
    if value is None or value == []:
        return {name: Output(default_binary) for name in op.outputs}
    outputs: dict[str, Output] = {}
    for name, entry in _entries(op, value, "outputs", op.outputs):
        parameters = _parameters(entry, f"{name}: parameters", _OUTPUT_PARAMETERS)
        region = _read_region(parameters, name)
        outputs[name] = Output(_flag(parameters.get("binary_data", default_binary), f"{name}: binary_data"), region)
    return outputs


def _stored(op: AnyOp, outputs: Mapping[str, Output], value: object) -> dict[str, Output]:
    """`parameters: {"store": "@name"}`: the output stays on the device, and the answer only describes it."""
    name = check_storable(op, _resident(value, "store"))
    if any(wanted.region is not None for wanted in outputs.values()):
        raise InvalidRequest("store: the output goes into shared memory")
    return {output: Output(resident=name) for output in op.outputs}


def _read_region(parameters: Mapping[str, object], name: str) -> Region | None:
    region = parameters.get("shared_memory_region")
    if "shared_memory_region" not in parameters:
        if any(key in parameters for key in _REGION_PARAMETERS):
            raise InvalidRequest(f"{name}: shared_memory_region is missing")
        return None
    if not isinstance(region, str) or not region:
        raise InvalidRequest(f"{name}: shared_memory_region: expected a name")
    if "shared_memory_byte_size" not in parameters:
        raise InvalidRequest(f"{name}: shared_memory_byte_size is missing")
    size = _whole(parameters["shared_memory_byte_size"], f"{name}: shared_memory_byte_size")
    offset = _whole(parameters.get("shared_memory_offset", 0), f"{name}: shared_memory_offset")
    return Region(region, size, offset)


def _entries(op: AnyOp, value: object, field: str, known: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the objects of `inputs` or `outputs` by name, each of a known one and once."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{field}: expected a list; got {kind_of(value)}")
    names: set[str] = set()
    for entry in value:
        if not isinstance(entry, dict):
            raise InvalidRequest(f"{field}: expected objects; got {kind_of(entry)}")
        name = entry.get("name")
        if not isinstance(name, str):
            raise InvalidRequest(f"{field}: name: expected a string; got {kind_of(name)}")
        if name not in known:
            raise InvalidRequest(f"{field}: {op.name} has no {field[:-1]} {name[:64]!r}; it has {', '.join(known)}")
        if name in names:
            raise InvalidRequest(f"{field}: {name!r} is given twice")
        names.add(name)
        yield name, entry


def _parameters(entry: Mapping[str, object], field: str, known: tuple[str, ...] | None = None) -> dict[str, object]:
    """The `parameters` of an object: names and scalars. Without `known`, the caller checks the names."""
    value = entry.get("parameters")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{field}: expected an object; got {kind_of(value)}")
    for name, one in value.items():
        if type(one) not in _SCALARS:
            raise InvalidRequest(
                f"{field}: {name[:64]!r}: expected a string, a number or a boolean; got {kind_of(one)}"
            )
        if known is not None and name not in known and not _asks_nothing(name, one):
            raise InvalidRequest(f"{field}: {name[:64]!r} is not offered; expected one of {', '.join(known)}")
    return dict(value)


def _whole(value: object, field: str) -> int:
    # Not isinstance: True is an int there.
    if type(value) is not int or not 0 <= value <= _MAX_BYTES:
        raise InvalidRequest(f"{field}: expected a whole number in [0, 2^63 - 1]")
    return value


def _flag(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{field}: expected true or false; got {kind_of(value)}")
    return value

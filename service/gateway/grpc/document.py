"""Turns a `ModelInferRequest` into the objects that the protocol's JSON has, which `api.v2.header` reads and checks.

Owns the fields of typed contents. Errors common to both transports are refused there; here only those that JSON has no
words for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tilewire.service.dtypes import BY_OIP
from tilewire.service.errors import InvalidRequest
from tilewire.service.gateway.codecs.json_numbers import FlatArray
from tilewire.service.gateway.grpc.open_inference_pb2 import InferParameter, ModelInferRequest

# Field of typed contents by datatype; the others of ours travel in raw contents only.
_CONTENTS = {
    "INT8": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def document_of(request: ModelInferRequest, raw_bytes: Sequence[int]) -> dict[str, object]:
    """Returns the members that JSON would have, of a request without its raw contents, and the lengths of those.

    Raises:
        InvalidRequest: Raw and typed contents contradict the inputs.
    """
    lengths = iter(raw_bytes)
    inputs = [_input(one, lengths, is_raw=bool(raw_bytes)) for one in request.inputs]
    if (rest := len(list(lengths))) > 0:
        raise InvalidRequest(
            f"raw_input_contents: {len(raw_bytes)} are given, {rest} more than there are inputs without other data"
        )
    outputs = [{"name": one.name, "parameters": _parameters(one.parameters)} for one in request.outputs]
    return {
        "id": request.id,
        "parameters": _parameters(request.parameters),
        "inputs": inputs,
        "outputs": outputs,
    }


def _input(one: ModelInferRequest.InferInputTensor, lengths: Iterator[int], *, is_raw: bool) -> dict[str, object]:
    parameters = _parameters(one.parameters)
    entry: dict[str, object] = {"name": one.name, "parameters": parameters}
    is_resident = "resident" in parameters
    # KServe's client says it as over HTTP.
    declared = parameters.pop("binary_data_size", None)
    if one.datatype or one.shape or not is_resident:
        entry |= {"datatype": one.datatype, "shape": list(one.shape)}
    contents = one.contents.ListFields()
    if is_raw and contents:
        raise InvalidRequest(f"{one.name}: contents: leave them out beside raw_input_contents")
    if is_resident or "shared_memory_region" in parameters:
        if contents:
            raise InvalidRequest(f"{one.name}: contents: leave them out where a resident or a region is named")
    elif not is_raw:
        entry["data"] = _numbers(one, [(field.name, values) for field, values in contents])
    elif (length := next(lengths, None)) is not None:
        if declared not in (None, length):
            raise InvalidRequest(f"{one.name}: binary_data_size {declared}; raw_input_contents has {length} bytes")
        parameters["binary_data_size"] = length
    else:
        raise InvalidRequest(f"{one.name}: raw_input_contents: there is none for it, nor a resident or a region")
    return entry


def _numbers(one: ModelInferRequest.InferInputTensor, contents: list[tuple[str, Sequence[int | float]]]) -> FlatArray:
    """The typed contents; those of an unknown datatype do not matter, as it is refused."""
    wanted = _CONTENTS.get(one.datatype)
    if wanted is None:
        if one.datatype in BY_OIP:
            raise InvalidRequest(f"{one.name}: {one.datatype} has no typed contents; send raw_input_contents")
        return FlatArray(())
    for name, _ in contents:
        if name != wanted:
            raise InvalidRequest(f"{one.name}: contents: {name} is given; {one.datatype} is in {wanted}")
    return FlatArray(contents[0][1] if contents else ())


def _parameters(parameters: Mapping[str, InferParameter]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, one in parameters.items():
        choice = one.WhichOneof("parameter_choice")
        found[name] = None if choice is None else getattr(one, choice)
    return found

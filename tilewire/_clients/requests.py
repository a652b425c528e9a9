"""Builds the request of each method of the clients, and reads its reply: all that both clients share. Sends nothing."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import numpy as np

from tilewire._arrays.dlpack import is_foreign, is_viewed
from tilewire._arrays.dtypes import dtype_name
from tilewire._arrays.files import Destination, Source
from tilewire._arrays.host import CONTENT_TYPE, HostArray, to_safetensors
from tilewire._arrays.operands import OPTIONAL_OPERANDS, Prepared, is_weak, prepare, prepare_inputs
from tilewire._errors import NotFound, ServerError, TilewireError
from tilewire._names import program_name, tensor_name
from tilewire._programs.program import Program
from tilewire._transport import wire
from tilewire._transport.wire import Call, Progress, Reply
from tilewire._types import Answer, IfMatch, Resident, TensorInfo

T = TypeVar("T")
MakeHandle = Callable[[TensorInfo], Any]

# Options that are headers.
_HEADERS = ("timeout_ms", "request_id", "if_match")
_VERSIONS = 'a version such as handle.version, several, or "*"'
# Inputs in the order in which their resident is the key of a request: the large operand first.
_KEYS = ("b", "a", "x", "y")


@dataclass(frozen=True, slots=True)
class Request(Generic[T]):
    """One request and how its reply is read.

    Attributes:
        call: Call to send.
        parse: Reads the reply; its second argument makes handles of stored tensors.
        like: Array of whose library the results are; None where they are views of the reply.
    """

    call: Call
    parse: Callable[[Reply, MakeHandle], T]
    like: Any = None

    def copied_from(self, reply: Reply) -> list[Any]:
        """Returns what is copied when the reply is read, and the array whose device it is copied to."""
        return [] if self.like is None or is_viewed(self.like) else [reply.body, self.like]


@dataclass(frozen=True, slots=True)
class Rules:
    """Choices of one client that hold for each of its requests.

    Attributes:
        cast: Dtype for arrays of a dtype that an op does not take; None makes them an error.
    """

    cast: str | None = None

    @classmethod
    def of(cls, cast: object) -> Rules:
        """Checks a user's choices.

        Raises:
            TypeError: `cast` is no dtype.
        """
        return cls(None if cast is None else dtype_name(cast, "cast"))

    def copied(self, operands: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> list[Any]:
        """Returns the arrays and lists among operands and options that may be converted or copied before they are sent."""
        # What is no mapping is refused when the request is built.
        values = list(operands.values()) if isinstance(operands, Mapping) else []
        values += [value for name, value in (options or {}).items() if name in OPTIONAL_OPERANDS]
        arrays = [
            value for value in values if isinstance(value, np.ndarray | HostArray | list | tuple) or is_foreign(value)
        ]
        is_mixed = len(set(map(_kind_of, values)) - {None}) > 1
        return arrays if self.cast is not None or is_mixed else [one for one in arrays if not _is_sent_as_it_is(one)]

    def op(
        self, op: str, operands: Mapping[str, Any], options: Mapping[str, Any], store: str | None
    ) -> Request[Answer]:
        """Builds the request of one op.

        Args:
            op: Its name.
            operands: By input name; None for those that are not given.
            options: By name; None leaves one at the server's default.
            store: Name under which the result stays on the server, or None to get it.

        Raises:
            TypeError: An operand or option of a type or dtype that cannot be sent.
            ValueError: A name that cannot be a tensor's.
        """
        options = {name: value for name, value in options.items() if value is not None}
        if "out_dtype" in options:
            options["out_dtype"] = dtype_name(options["out_dtype"], "out_dtype")
        inputs = {**operands, **{name: options.pop(name) for name in OPTIONAL_OPERANDS if name in options}}
        prepared = prepare(op, inputs, cast=self.cast, out_dtype=options.get("out_dtype"))
        for name in prepared.dropped:
            options.pop(name, None)
        if store is not None and prepared.squeezed:
            raise ValueError("store: a product with a vector is kept as a matrix; pass x[None, :] or v[:, None]")
        call = _call(f"/v1/{quote(op, safe='')}", prepared, options, store)
        return Request(call, lambda reply, handle: _answer(reply, handle, prepared), prepared.like)

    def put(
        self,
        name: str,
        array: Any,
        progress: Progress | None = None,
        placement: str | None = None,
        axis: int | None = None,
        if_match: IfMatch | None = None,
    ) -> Request[Any]:
        """Builds the upload of one resident tensor."""
        try:
            host = array if isinstance(array, HostArray) else HostArray.of(array)
        except (TypeError, ValueError) as error:
            raise TypeError(f"array: {error}") from error
        given = {"placement": placement, "axis": axis}
        query = {field: str(value) for field, value in given.items() if value is not None}
        # For the server's words, which begin with the tensor's name in the body. No tensor there is called `__metadata__`.
        body = {f"tensor {tensor_name(name)}": host}
        call = replace(_with_body(_tensor_call("PUT", name, if_match), body), progress=progress, query=query)
        return Request(call, lambda reply, handle: handle(wire.parse_info(wire.parse_object(reply))))

    def needs_declaration(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the declared dtypes of a program decide how its inputs are sent."""
        values = inputs.values() if isinstance(inputs, Mapping) else ()
        return self.cast is not None or any(is_weak(value) for value in values)

    def run_program(
        self,
        target: str | Program,
        inputs: Mapping[str, Any],
        options: Mapping[str, Any],
        declared: Program | None = None,
    ) -> Request[Answer]:
        """Builds a run of a program: a kept one by its name, or one that travels with its inputs.

        Args:
            target: Name, or the program itself.
            inputs: Operands by input name.
            options: `timeout_ms`, `request_id` and `if_match`.
            declared: Program that the name stands for, where it is known: lists then take the declared dtypes.
        """
        declared = target if isinstance(target, Program) else declared
        dtypes = {} if declared is None else {name: spec.dtype for name, spec in declared.inputs.items()}
        prepared = prepare_inputs(inputs, dtypes, self.cast)
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(target, Program):
            metadata = {"program": json.dumps(target.to_dict())}
            call = _call("/v1/run", prepared, options, None, metadata)
        else:
            call = _call(f"/v1/programs/{program_name(target)}", prepared, options, None)
            call = replace(call, headers={wire.KEY_HEADER: target, **call.headers})
        return Request(call, lambda reply, handle: _answer(reply, handle, prepared), prepared.like)


def with_one_axis(options: Mapping[str, object]) -> Mapping[str, Any]:
    """Returns the options of an op that reads one axis.

    Raises:
        TypeError: The axis is None: with NumPy and SciPy that is every element, and not the last axis.
    """
    if options.get("axis", -1) is None:
        raise TypeError("axis: None is no axis; leave it out for the last one, or pass x.reshape(-1) for all elements")
    return options


def _kind_of(value: Any) -> str | None:
    """Returns the dtype of an operand, or the type of one without a dtype; None for a resident of an unknown one."""
    if isinstance(value, Resident):
        value = value.described
    if value is None or isinstance(value, str):
        return None
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


def _is_sent_as_it_is(array: Any) -> bool:
    """Whether the bytes of an array are those of the request, if its dtype is."""
    if isinstance(array, list | tuple):
        return False
    data = array.data if isinstance(array, HostArray) else array
    if isinstance(data, np.ndarray):
        return data.flags.c_contiguous and data.dtype.isnative
    return is_viewed(data) and data.is_contiguous()


def sources(name: str, path: Source) -> dict[str, HostArray]:
    """Returns the arrays of a file by the name that each gets on the server."""
    return {tensor_name(full): array for full, array in path.arrays(name).items()}


def get(
    name: str,
    into: Destination | None = None,
    progress: Progress | None = None,
    if_match: IfMatch | None = None,
) -> Request[Any]:
    """Builds the download of one resident tensor, to an array or to a file."""
    call = replace(_tensor_call("GET", name, if_match), progress=progress)
    if into is not None:
        call = replace(call, headers={**call.headers, "Accept": into.content_type}, make_buffer=into.make_buffer)

    def parse(reply: Reply, _: MakeHandle) -> Any:
        wire.checked(reply)
        if into is None:
            return _only(wire.parse_arrays(reply), reply).numpy()
        if wire.content_type(reply.headers) != into.content_type:
            raise wire.unexpected(reply, into.content_type)
        return into.finish(reply.body)

    return Request(call, parse)


def head(name: str) -> Request[TensorInfo | None]:
    """Builds the request for a tensor's description."""
    return Request(_tensor_call("HEAD", name), lambda reply, _: wire.parse_head(reply, name))


def there(info: TensorInfo | None, name: str) -> TensorInfo:
    """Returns a description.

    Raises:
        NotFound: It is None.
    """
    if info is None:
        raise NotFound(f"name: no tensor {name!r}", status=404)
    return info


def delete(name: str, if_match: IfMatch | None = None) -> Request[None]:
    """Builds the removal of a tensor."""
    return Request(_tensor_call("DELETE", name, if_match), lambda reply, _: wire.check_gone(reply))


def tensors() -> Request[list[Any]]:
    """Builds the listing of the resident tensors; each is a handle."""
    call = Call("GET", "/v1/tensors", headers={"Accept": "application/json"})
    return Request(call, lambda reply, handle: [handle(wire.parse_info(entry)) for entry in wire.parse_list(reply)])


def why_not(kind: str, max_silence_s: float | None) -> Request[str | None]:
    """Builds a health check, `live` or `ready`; its reply is read as the reason why it is not so, or None."""

    def parse(reply: Reply, _: MakeHandle) -> str | None:
        try:
            is_so = wire.parse_object(reply).get(kind) is True
        except TilewireError as error:
            return error.detail
        return None if is_so else wire.unexpected(reply, f"{kind}: true").detail

    return Request(Call("GET", f"/v2/health/{kind}", max_silence_s=max_silence_s), parse)


def keep_program(name: str, program: Program) -> Request[None]:
    """Builds the upload of a program."""
    body = (json.dumps(program.to_dict()).encode(),)
    call = replace(_program_call("PUT", name), parts=body)
    call = replace(call, headers={**call.headers, **wire.body_headers(body, "application/json")})

    def parse(reply: Reply, _: MakeHandle) -> None:
        if wire.parse_object(reply).get("name") != name:
            raise wire.unexpected(reply, f"the description of the program {name!r}")

    return Request(call, parse)


def program(name: str) -> Request[Program]:
    """Builds the download of a program."""

    def parse(reply: Reply, _: MakeHandle) -> Program:
        document = wire.parse_object(reply)
        # A description has the program itself under a key, beside what the server adds.
        if isinstance(document.get("program"), dict):
            document = document["program"]
        # A server may say more of it.
        document = {name: document[name] for name in ("inputs", "steps", "outputs") if name in document}
        try:
            return Program.from_dict(document)
        except ValueError as error:
            raise ServerError(f"not a program: {error}", status=reply.status) from error

    return Request(_program_call("GET", name), parse)


def delete_program(name: str) -> Request[None]:
    """Builds the removal of a program."""
    return Request(_program_call("DELETE", name), lambda reply, _: wire.check_gone(reply))


def programs() -> Request[list[str]]:
    """Builds the listing of the programs' names."""

    def parse(reply: Reply, _: MakeHandle) -> list[str]:
        entries = wire.parse_list(reply)
        names: list[Any] = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
        if not all(isinstance(name, str) for name in names):
            raise wire.unexpected(reply, "names of programs")
        return names

    return Request(Call("GET", "/v1/programs", headers={"Accept": "application/json"}), parse)


def _call(
    path: str,
    prepared: Prepared,
    options: Mapping[str, Any],
    store: str | None,
    metadata: Mapping[str, str] | None = None,
) -> Call:
    query = {name: _text(value) for name, value in options.items() if name not in _HEADERS}
    query |= {name: f"@{resident}" for name, resident in prepared.residents.items()}
    if store is not None:
        query["store"] = f"@{tensor_name(store, 'store')}"
    headers = _key_of(prepared.residents) | _condition(options.get("if_match"))
    if options.get("request_id"):
        headers["X-Request-Id"] = request_id = str(options["request_id"])
        wire.check_header("request_id", request_id)
    timeout_ms = options.get("timeout_ms")
    if timeout_ms is not None:
        if not isinstance(timeout_ms, int | float | np.integer | np.floating):
            raise TypeError(f"timeout_ms: expected milliseconds, got {timeout_ms!r}")
        timeout_ms = float(timeout_ms)
        if not 0 < timeout_ms < math.inf:
            raise ValueError(f"timeout_ms: expected more than 0, or None for no limit, got {timeout_ms}")
        headers["X-Timeout-Ms"] = str(max(1, round(timeout_ms)))
    call = Call("POST", path, query, headers, timeout_ms=timeout_ms)
    return _with_body(call, prepared.arrays, metadata)


def _key_of(residents: Mapping[str, str]) -> dict[str, str]:
    name = next((residents[key] for key in _KEYS if key in residents), next(iter(residents.values()), None))
    return {} if name is None else {wire.KEY_HEADER: name}


def _condition(if_match: IfMatch | None) -> dict[str, str]:
    """Returns the header that demands a version.

    Raises:
        TypeError: Nothing that has a version.
    """
    if if_match is None:
        return {}
    if if_match == "*":
        return {"If-Match": "*"}
    is_several = isinstance(if_match, Collection) and not isinstance(if_match, str | bytes | TensorInfo | Resident)
    wanted: Any = if_match if is_several else [if_match]
    versions = [_version_of(one) for one in wanted]
    if not versions or not all(one >= 0 for one in versions):
        raise TypeError(f"if_match: expected {_VERSIONS}; got {if_match!r}")
    return {"If-Match": ", ".join(f'"{one}"' for one in versions)}


def _version_of(one: Any) -> int:
    if isinstance(one, TensorInfo | Resident):
        described = one if isinstance(one, TensorInfo) else one.described
        if described is None or described.version is None:
            raise TypeError(
                f"if_match: the version of @{one.name} is not known; type c.tensors[{one.name!r}].describe()"
            )
        return described.version
    try:
        if not isinstance(one, bool):
            return operator.index(one)
    except TypeError:
        pass
    raise TypeError(f"if_match: expected {_VERSIONS}; got {one!r}")


def _tensor_call(method: str, name: str, if_match: IfMatch | None = None) -> Call:
    headers = {wire.KEY_HEADER: tensor_name(name), "Accept": CONTENT_TYPE, **_condition(if_match)}
    return Call(method, f"/v1/tensors/{quote(tensor_name(name))}", headers=headers)


def _program_call(method: str, name: str) -> Call:
    headers = {wire.KEY_HEADER: program_name(name), "Accept": "application/json"}
    return Call(method, f"/v1/programs/{program_name(name)}", headers=headers)


def _with_body(call: Call, arrays: Mapping[str, HostArray], metadata: Mapping[str, str] | None = None) -> Call:
    parts = to_safetensors(arrays, metadata) if arrays or metadata else ()
    headers = {**call.headers, "Accept": CONTENT_TYPE, **wire.body_headers(parts)}
    return replace(call, headers=headers, parts=parts)


def _answer(reply: Reply, make_handle: MakeHandle, prepared: Prepared) -> Answer:
    wire.checked(reply)
    outputs, handle = {}, None
    if wire.content_type(reply.headers) == "application/json":
        handle = make_handle(wire.parse_info(wire.parse_object(reply)))
    else:
        arrays = wire.parse_arrays(reply)
        outputs = {name: _squeezed(array, prepared).like(prepared.like) for name, array in arrays.items()}
    batch_size = reply.headers.get("x-batch-size") or ""
    return Answer(
        outputs=outputs,
        handle=handle,
        request_id=reply.headers.get("x-request-id"),
        batch_size=int(batch_size) if batch_size.isdecimal() else None,
        timings_ms=wire.parse_timings(reply.headers.get("server-timing") or ""),
    )


def _squeezed(array: HostArray, prepared: Prepared) -> HostArray:
    return HostArray(array.dtype, array.data.squeeze(prepared.squeezed)) if prepared.squeezed else array


def _only(arrays: Mapping[str, HostArray], reply: Reply) -> HostArray:
    if len(arrays) != 1:
        raise ServerError(f"the answer is not one safetensors tensor but {len(arrays)}", status=reply.status)
    return next(iter(arrays.values()))


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool | np.bool_) else str(value)

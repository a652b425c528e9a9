"""Describes the server and its models to clients of the Open Inference Protocol, from the table of ops.

Owns names, versions and extensions.

A model takes any rank and several datatypes, for which the protocol has no words. The metadata names the datatype and
the rank that a caller without an opinion should use. The parameters list the others, and optional inputs too: load
generators send everything that is among the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import InvalidRequest, UnknownName
from tilewire.service.gateway.api.health import why_not_ready
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.auth.authenticator import authorise
from tilewire.service.gateway.request.context import Gateway, RequestContext
from tilewire.service.ops.op import AnyOp, TensorType
from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS

PLATFORM = "tilewire"
DATATYPE = "FP32"

# As Triton calls them; each is here because all of it works.
EXTENSIONS = (
    "binary_tensor_data",
    "parameters",
    "statistics",
    "schedule_policy",
    "model_configuration",
    "model_repository",
)


class Model(msgspec.Struct, frozen=True):
    """Description of an op or of a kept program for clients: required inputs, outputs, and further facts as text."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, str]


class Tensor(msgspec.Struct, frozen=True):
    """One input or output of a model: its datatype in the protocol's words; its sizes, -1 for any."""

    name: str
    datatype: str
    shape: tuple[int, ...]


async def find_model(gateway: Gateway, context: RequestContext, model: str, version: str | None = None) -> Model:
    """Looks up an op, or a kept program.

    Raises:
        UnknownName: No such model, or no such version of it.
        Forbidden: No op, and the key may run no program: whether there is such a program or not.
    """
    if model in OPS:
        return model_of_op(model_named(model, version))
    authorise(context.granted, op=PROGRAM)
    with gateway.admission.admit(context.flow) as leases:
        try:
            kept = await gateway.programs.find(model, leases)
        except (UnknownName, InvalidRequest):
            kept = None
        if kept is None:
            return model_of_op(model_named(model, version))
        check_version(model, version)
        values = await gateway.programs.values(kept, context.granted)
    program = kept.op.program
    return Model(
        model,
        tuple(Tensor(name, DTYPES[one.dtype].oip, one.shape) for name, one in program.inputs.items()),
        tuple(_output_of(name, values.get(name)) for name in program.outputs),
        {"steps": str(len(program.steps)), "residents": " ".join(program.residents)},
    )


def _output_of(name: str, kind: TensorType | None) -> Tensor:
    """An output of a program; one that depends on residents that are not there, or do not fit, has no known rank."""
    if kind is None:
        return Tensor(name, DATATYPE, (-1,))
    return Tensor(name, DTYPES[kind.dtype].oip, kind.shape)


def model_of_op(op: AnyOp) -> Model:
    """Describes an op."""

    def tensor(name: str) -> Tensor:
        return Tensor(name, op.output_datatypes.get(name, DATATYPE), (-1,) * op.ranks[name])

    return Model(
        op.name,
        tuple(map(tensor, op.required)),
        tuple(map(tensor, op.outputs)),
        {
            "datatypes": " ".join(DTYPES[name].oip for name in op.dtypes),
            "optional_inputs": " ".join(op.optional),
            "options": " ".join(op.options.__struct_fields__),
        },
    )


def model_named(model: str, version: str | None = None) -> AnyOp:
    """Looks up an op.

    Raises:
        UnknownName: No such model, or no such version of it.
    """
    op = OPS.get(model)
    if op is None:
        raise UnknownName(f"model: no model {model[:64]!r}; there are {', '.join(OPS)}")
    check_version(model, version)
    return op


def check_version(model: str, version: str | None) -> None:
    """Checks a version of a model that there is; None is any.

    Raises:
        UnknownName: There is no such version of it.
    """
    if version not in (None, VERSION):
        raise UnknownName(f"version: {model[:64]} has no version {str(version)[:64]!r}; it has {VERSION}")


async def describe_statistics(
    gateway: Gateway, context: RequestContext, model: str = "", version: str | None = None
) -> dict[str, object]:
    """Statistics of a model, or of every one without a name.

    Raises:
        TilewireError: Raised by `find_model`.
    """
    if model:
        names = [(await find_model(gateway, context, model, version)).name]
    else:
        names = [*OPS, *await _program_names(gateway, context)]
    return {"model_stats": await gateway.metrics.statistics(names)}


async def _program_names(gateway: Gateway, context: RequestContext) -> list[str]:
    """The kept programs that the caller may hear of; none while no engine is ready."""
    if why_not_ready(gateway) is not None or not context.granted.may_run(PROGRAM):
        return []
    return await gateway.programs.names()


def describe_server(gateway: Gateway) -> dict[str, object]:
    """The server's metadata, and what it computes with."""
    return {
        "name": PLATFORM,
        "version": gateway.version,
        "extensions": [*EXTENSIONS, *(["system_shared_memory"] if gateway.settings.allow_shared_memory else [])],
        "engines": [
            {
                "backend": one.backend,
                "device": one.device,
                "device_name": one.device_name,
                "torch": one.torch,
                "triton": one.triton,
            }
            for one in gateway.engines.welcomes
        ],
    }


def describe_model(model: Model) -> dict[str, object]:
    """A model's metadata."""
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": model.inputs,
        "outputs": model.outputs,
        "parameters": model.parameters,
    }


def configure_model(model: Model) -> dict[str, object]:
    """A model's configuration.

    `max_batch_size` is 0 because no dimension of a request is a batch of requests; those form by themselves.
    """
    return {
        "name": model.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [_configured(one) for one in model.inputs],
        "output": [_configured(one) for one in model.outputs],
    }


def _configured(tensor: Tensor) -> dict[str, object]:
    return {"name": tensor.name, "data_type": f"TYPE_{tensor.datatype}", "dims": tensor.shape}


class IndexRequest(msgspec.Struct, frozen=True):
    """Body of a request for the index: whether only models that compute are listed."""

    ready: bool = False


def parse_index_request(body: bytes) -> IndexRequest:
    """Parses the body of a request for the index, which may be empty.

    Raises:
        InvalidRequest: No JSON object, or `ready` is no boolean.
    """
    try:
        return msgspec.json.decode(body, type=IndexRequest) if body else IndexRequest()
    except (msgspec.MsgspecError, RecursionError) as error:
        raise InvalidRequest(f"ready: expected an object with a boolean; {error}") from None


async def index_models(gateway: Gateway, context: RequestContext, *, only_ready: bool) -> list[dict[str, object]]:
    """The repository's index: all models, or those that compute."""
    is_ready = why_not_ready(gateway) is None
    if only_ready and not is_ready:
        return []
    state = {"state": "READY", "reason": ""} if is_ready else {"state": "UNAVAILABLE", "reason": "no engine is ready"}
    names = (*OPS, *await _program_names(gateway, context))
    return [{"name": name, "version": VERSION, **state} for name in names]

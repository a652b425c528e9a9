"""What clients of the Open Inference Protocol are told of the server and of its models, written from the table of ops.

Owns names, versions and extensions. Knows no request.

A model takes any rank and several datatypes, for which the protocol has no words: the metadata names the datatype and the rank
that a caller without an opinion should use, and lists the others among its parameters. Optional inputs stand there too: load
generators send whatever is among the inputs.
"""

from __future__ import annotations

from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import UnknownName
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.ops.op import AnyOp
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


def model_named(model: str, version: str | None = None) -> AnyOp:
    """Looks a model up.

    Raises:
        UnknownName: No such model, or no such version of it.
    """
    op = OPS.get(model)
    if op is None:
        raise UnknownName(f"model: no model {model[:64]!r}; there are {', '.join(OPS)}")
    if version not in (None, VERSION):
        raise UnknownName(f"version: {model} has no version {str(version)[:64]!r}; it has {VERSION}")
    return op


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


def describe_model(op: AnyOp) -> dict[str, object]:
    """A model's metadata."""
    return {
        "name": op.name,
        "versions": [VERSION],
        "platform": PLATFORM,
        "inputs": [_tensor(op, name) for name in op.required],
        "outputs": [_tensor(op, name) for name in op.outputs],
        "parameters": {
            "datatypes": " ".join(DTYPES[name].oip for name in op.dtypes),
            "optional_inputs": " ".join(op.optional),
            "options": " ".join(op.options.__struct_fields__),
        },
    }


def _tensor(op: AnyOp, name: str) -> dict[str, object]:
    return {"name": name, "datatype": op.output_datatypes.get(name, DATATYPE), "shape": [-1] * op.ranks[name]}


def configure_model(op: AnyOp) -> dict[str, object]:
    """A model's configuration.

    `max_batch_size` is 0 because no dimension of a request is a batch of requests; those form by themselves.
    """
    return {
        "name": op.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,
        "input": [_configured(op, name) for name in op.required],
        "output": [_configured(op, name) for name in op.outputs],
    }


def _configured(op: AnyOp, name: str) -> dict[str, object]:
    datatype = op.output_datatypes.get(name, DATATYPE)
    return {"name": name, "data_type": f"TYPE_{datatype}", "dims": [-1] * op.ranks[name]}


def index_models(*, is_ready: bool) -> list[dict[str, object]]:
    """The repository's index."""
    state = {"state": "READY", "reason": ""} if is_ready else {"state": "UNAVAILABLE", "reason": "no engine is ready"}
    return [{"name": name, "version": VERSION, **state} for name in OPS]

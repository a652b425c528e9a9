"""gRPC calls without a client library of the protocol: raw messages in, messages or errors out. Knows no test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import Array
from tilewire.service.dtypes import DTYPES
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.paths import INFER, SERVICE, STREAM_INFER

TIMEOUT_S = 30.0


@contextlib.contextmanager
def channel_to(server: LiveServer, *options: tuple[str, object]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc_address, options=[("grpc.enable_http_proxy", 0), *options]) as channel:
        yield channel


def request_of(model: str, arrays: dict[str, Array], **members: Any) -> pb.ModelInferRequest:
    """An infer request with raw contents."""
    request = pb.ModelInferRequest(model_name=model, **members)
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=DTYPES[array.dtype.name].oip, shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def infer(
    channel: grpc.Channel, request: pb.ModelInferRequest | bytes, metadata: Sequence[tuple[str, str]] = (), **call: Any
) -> pb.ModelInferResponse:
    answer, _ = infer_with_call(channel, request, metadata, **call)
    return answer


def infer_with_call(
    channel: grpc.Channel, request: pb.ModelInferRequest | bytes, metadata: Sequence[tuple[str, str]] = (), **call: Any
) -> tuple[pb.ModelInferResponse, grpc.Call]:
    message = request if isinstance(request, bytes) else request.SerializeToString()
    answer, done = channel.unary_unary(INFER).with_call(message, metadata=metadata, **{"timeout": TIMEOUT_S, **call})
    return pb.ModelInferResponse.FromString(answer), done


def infer_stream(
    channel: grpc.Channel, messages: Sequence[bytes], metadata: Sequence[tuple[str, str]] = (), **call: Any
) -> list[pb.ModelStreamInferResponse]:
    answers = channel.stream_stream(STREAM_INFER)(iter(messages), metadata=metadata, timeout=TIMEOUT_S, **call)
    return [pb.ModelStreamInferResponse.FromString(answer) for answer in answers]


def ask(channel: grpc.Channel, method: str, /, metadata: Sequence[tuple[str, str]] = (), **members: Any) -> Any:
    """Calls a method by its name, with the members of its request."""
    request = getattr(pb, f"{method}Request")(**members)
    answer = channel.unary_unary(f"/{SERVICE}/{method}")(
        request.SerializeToString(), metadata=metadata, timeout=TIMEOUT_S
    )
    return getattr(pb, f"{method}Response").FromString(answer)


def out_of(answer: pb.ModelInferResponse, place: int = 0, dtype: Any = np.float32) -> Array:
    array: Array = np.frombuffer(answer.raw_output_contents[place], dtype)
    return array.reshape(list(answer.outputs[place].shape))


@contextlib.contextmanager
def refused(code: grpc.StatusCode, text: str) -> Iterator[list[grpc.RpcError]]:
    """Expects a refusal; the list holds it afterwards."""
    errors: list[grpc.RpcError] = []
    with pytest.raises(grpc.RpcError) as caught:
        yield errors
    error = caught.value
    assert (error.code(), text in error.details()) == (code, True), error
    errors.append(error)


def trailing(call: grpc.Call | grpc.RpcError) -> dict[str, str]:
    return {name: value for name, value in call.trailing_metadata() or () if isinstance(value, str)}

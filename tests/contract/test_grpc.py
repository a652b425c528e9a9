"""The gRPC door on the wire: contents, statuses, metadata, health, reflection, and what is no request."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import grpc
import httpx
import ml_dtypes
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.support.exposition import scrape, settles, total
from tests.support.grpc_calls import (
    TIMEOUT_S,
    ask,
    channel_to,
    infer,
    infer_stream,
    infer_with_call,
    out_of,
    refused,
    request_of,
    trailing,
)
from tests.support.live_server import LiveServer
from tests.support.tensor_bodies import to_safetensors
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.paths import HEALTH_SERVICE, INFER, REFLECTION_PATHS, REFLECTION_SERVICES, SERVICE

A = np.arange(6, dtype=np.float32).reshape(2, 3)
ADD = {"a": A, "b": A}
INVALID, EXHAUSTED = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED
TYPED = {
    "float32": "fp32_contents",
    "float64": "fp64_contents",
    "int32": "int_contents",
    "int64": "int64_contents",
}


@pytest.fixture(scope="module")
def channel(grpc_server: LiveServer) -> Iterator[grpc.Channel]:
    with channel_to(grpc_server) as channel:
        yield channel


@pytest.fixture
def http(grpc_server: LiveServer) -> Iterator[httpx.Client]:
    with grpc_server.client() as client:
        yield client


def typed(dtype: str, field: str = "") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="add", id="t")
    for name in "ab":
        one = request.inputs.add(name=name, datatype=dtype, shape=[2, 3])
        if field:
            getattr(one.contents, field).extend(range(6))
    return request


@pytest.mark.parametrize(("dtype", "field"), TYPED.items())
def test_typed_contents(channel: grpc.Channel, dtype: str, field: str) -> None:
    datatype = {"float32": "FP32", "float64": "FP64", "int32": "INT32", "int64": "INT64"}[dtype]
    answer = infer(channel, typed(datatype, field))
    np.testing.assert_array_equal(out_of(answer, dtype=dtype), 2 * A.astype(dtype))
    assert (answer.id, answer.model_version) == ("t", "1")


def test_typed_int8(channel: grpc.Channel) -> None:
    request = pb.ModelInferRequest(model_name="matmul")
    for name, shape in (("a", [2, 3]), ("b", [3, 2])):
        one = request.inputs.add(name=name, datatype="INT8", shape=shape)
        one.contents.int_contents.extend(range(-3, 3))
    expected = np.arange(-3, 3).reshape(2, 3) @ np.arange(-3, 3).reshape(3, 2)
    np.testing.assert_array_equal(out_of(infer(channel, request), dtype=np.int32), expected)
    request.inputs[0].contents.int_contents[0] = 128
    with refused(INVALID, "a: holds a number outside [-128, 127] of int8"):
        infer(channel, request)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (typed("FP32", "fp64_contents"), "a: contents: fp64_contents is given; FP32 is in fp32_contents"),
        (typed("INT64", "int_contents"), "int_contents is given; INT64 is in int64_contents"),
        (typed("FP16", "fp32_contents"), "a: FP16 has no typed contents"),
        (typed("BF16"), "a: BF16 has no typed contents"),
        (typed("BOOL", "bool_contents"), "a: datatype 'BOOL'; expected one of"),
        (typed("UINT8", "uint_contents"), "a: datatype 'UINT8'"),
        (typed("BYTES"), "a: datatype 'BYTES'"),
        (typed("FP32"), "a: data holds 0 numbers; shape [2, 3] takes 6"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_contents_that_cannot_be_right(channel: grpc.Channel, request_: pb.ModelInferRequest, text: str) -> None:
    with refused(INVALID, text):
        infer(channel, request_)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_as_raw_contents(channel: grpc.Channel, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    a, b = (np.arange(16).reshape(4, 4) % 5 - 2).astype(kind), np.eye(4).astype(kind)
    answer = infer(channel, request_of("matmul", {"a": a, "b": b}))
    out = {"FP16": np.float16, "BF16": ml_dtypes.bfloat16}[answer.outputs[0].datatype]
    np.testing.assert_array_equal(out_of(answer, dtype=out).astype(np.float32), a.astype(np.float32))


def test_raw_contents_that_cannot_be_right(channel: grpc.Channel) -> None:
    request = request_of("add", ADD)
    request.raw_input_contents.append(b"")
    with refused(INVALID, "raw_input_contents: 3 are given, 1 more than"):
        infer(channel, request)
    del request.raw_input_contents[1:]
    with refused(INVALID, "b: raw_input_contents: there is none for it"):
        infer(channel, request)
    request = request_of("add", ADD)
    request.raw_input_contents[1] = b"\0" * 23
    with refused(INVALID, "b: binary_data_size 23; its datatype and shape [2, 3] make 24 bytes"):
        infer(channel, request)
    request = request_of("add", ADD)
    request.inputs[0].contents.fp32_contents.append(1)
    with refused(INVALID, "a: contents: leave them out beside raw_input_contents"):
        infer(channel, request)


def test_a_declared_length_is_that_of_the_raw_contents(channel: grpc.Channel) -> None:
    """KServe's client sends the parameter that HTTP has."""
    request = request_of("add", ADD)
    for one in request.inputs:
        one.parameters["binary_data_size"].int64_param = 24
    np.testing.assert_array_equal(out_of(infer(channel, request)), 2 * A)
    request.inputs[1].parameters["binary_data_size"].int64_param = 23
    with refused(INVALID, "b: binary_data_size 23; raw_input_contents has 24 bytes"):
        infer(channel, request)


def test_a_repeat_is_compared_to_the_last_byte_of_its_lengths(channel: grpc.Channel) -> None:
    """The cached request of equal size and equal header must not serve other lengths of contents."""
    for _ in range(3):
        np.testing.assert_array_equal(out_of(infer(channel, request_of("add", ADD))), 2 * A)
    request = request_of("add", ADD)
    request.raw_input_contents[0], request.raw_input_contents[1] = b"\0" * 20, b"\0" * 28
    with refused(INVALID, "a: binary_data_size 20"):
        infer(channel, request)
    request = request_of("add", {"a": A, "b": A.reshape(3, 2)})
    with refused(INVALID, "broadcast"):
        infer(channel, request)


def test_a_resident_stands_for_an_input(channel: grpc.Channel, http: httpx.Client) -> None:
    http.put("/v1/tensors/grpc/b", content=to_safetensors({"x": A})).raise_for_status()
    request = request_of("add", {"a": A})
    request.inputs.add(name="b").parameters["resident"].string_param = "grpc/b"
    for _ in range(2):
        np.testing.assert_array_equal(out_of(infer(channel, request)), 2 * A)
    request.inputs[1].datatype = "FP16"
    request.inputs[1].shape.extend([2, 3])
    with refused(INVALID, "b: 'grpc/b' is float32"):
        infer(channel, request)
    request.inputs[1].ClearField("datatype")
    request.inputs[1].ClearField("shape")
    request.inputs[1].contents.fp32_contents.append(1)
    del request.raw_input_contents[:]
    request.inputs[0].contents.fp32_contents.extend(range(6))
    with refused(INVALID, "b: contents: leave them out where a resident"):
        infer(channel, request)
    http.delete("/v1/tensors/grpc/b").raise_for_status()


def test_parameters_of_a_wrong_kind(channel: grpc.Channel) -> None:
    request = request_of("add", ADD)
    request.parameters["alpha"].SetInParent()
    with refused(INVALID, "parameters: 'alpha': expected a string, a number or a boolean; got nothing"):
        infer(channel, request)
    request.parameters["alpha"].uint64_param = 2
    np.testing.assert_array_equal(out_of(infer(channel, request)), 3 * A)


def test_request_ids_and_timings_are_metadata(channel: grpc.Channel) -> None:
    _, call = infer_with_call(channel, request_of("add", ADD), [("x-request-id", "mine")])
    found = trailing(call)
    assert (found["x-request-id"], found["x-batch-size"]) == ("mine", "1")
    assert "kernel;dur=" in found["server-timing"]
    with refused(INVALID, "inner dimension") as errors:
        infer(channel, request_of("matmul", ADD), [("x-request-id", "mine too")])
    # A space could begin another field of a log.
    assert len(trailing(errors[0])["x-request-id"]) == 32


@pytest.mark.parametrize(
    "message", [b"\xff", b"\x0a\xff", b"\x0a\x05ab", b"\x07", b"\x0a\x02\xff\xfe", b"nonsense" * 100, b"\x1f\x8b\x08\0"]
)
def test_what_is_no_request(channel: grpc.Channel, message: bytes) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        infer(channel, message)
    assert caught.value.code() in (INVALID, grpc.StatusCode.NOT_FOUND), caught.value
    assert out_of(infer(channel, request_of("add", ADD))).shape == (2, 3)


def test_a_call_without_a_message(channel: grpc.Channel) -> None:
    with refused(INVALID, "the call ended without a message"):
        channel.stream_unary(INFER)(iter(()), timeout=TIMEOUT_S)


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(f"/{SERVICE}/RepositoryModelLoad")(b"", timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_over_the_limit(channel: grpc.Channel) -> None:
    big = np.zeros(17 * 2**18, np.float32)
    with refused(EXHAUSTED, "larger than max"):
        infer(channel, request_of("softmax", {"x": big}))
    typed_contents = pb.ModelInferRequest(model_name="softmax")
    typed_contents.inputs.add(name="x", datatype="FP32", shape=[3 * 2**20]).contents.fp32_contents.extend(
        [0] * 3 * 2**20
    )
    with refused(EXHAUSTED, "send tensors as raw contents"):
        infer(channel, typed_contents)


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_messages(channel: grpc.Channel, coding: grpc.Compression) -> None:
    x = np.zeros((100, 100), np.float32)
    for _ in range(2):
        np.testing.assert_allclose(out_of(infer(channel, request_of("softmax", {"x": x}), compression=coding)), 0.01)
    answer = channel.unary_unary("/grpc.health.v1.Health/Check")(
        health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString(), compression=coding, timeout=TIMEOUT_S
    )
    assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING


def test_a_message_that_inflates_past_the_limit(channel: grpc.Channel) -> None:
    bomb = zlib.compress(bytes(2**28))
    with refused(EXHAUSTED, "inflates to more than the limit"):
        infer(channel, bomb)
    with refused(INVALID, "broken off"):
        infer(channel, zlib.compress(bytes(1000))[:-5])


def test_a_stream_reports_errors_and_goes_on(channel: grpc.Channel) -> None:
    good = request_of("add", ADD, id="good").SerializeToString()
    wrong = request_of("matmul", ADD, id="wrong").SerializeToString()
    answers = infer_stream(channel, [good, wrong, b"\xff", good])
    assert [answer.infer_response.id for answer in answers] == ["good", "wrong", "", "good"]
    assert ["inner dimension" in answer.error_message for answer in answers] == [False, True, False, False]
    assert "not a ModelInferRequest" in answers[2].error_message
    for answer in (answers[0], answers[3]):
        np.testing.assert_array_equal(out_of(answer.infer_response), 2 * A)
    assert infer_stream(channel, []) == []


@pytest.mark.parametrize("coding", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_an_error_of_a_compressed_stream_names_its_request(channel: grpc.Channel, coding: grpc.Compression) -> None:
    wrong = request_of("matmul", ADD, id="wrong").SerializeToString()
    (answer,) = infer_stream(channel, [wrong], compression=coding)
    assert (answer.infer_response.id, answer.infer_response.model_name) == ("wrong", "matmul")
    assert "inner dimension" in answer.error_message


def test_a_stream_longer_than_what_runs_at_once(channel: grpc.Channel) -> None:
    messages = [request_of("add", {"a": A + n, "b": A}, id=str(n)).SerializeToString() for n in range(200)]
    answers = infer_stream(channel, messages)
    assert [answer.infer_response.id for answer in answers] == [str(n) for n in range(200)]
    for number, answer in enumerate(answers):
        np.testing.assert_array_equal(out_of(answer.infer_response), 2 * A + number)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_health(channel: grpc.Channel, service: str) -> None:
    message = health_pb2.HealthCheckRequest(service=service).SerializeToString()
    answer = channel.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=TIMEOUT_S)
    assert health_pb2.HealthCheckResponse.FromString(answer).status == health_pb2.HealthCheckResponse.SERVING
    first = next(iter(channel.unary_stream("/grpc.health.v1.Health/Watch")(message, timeout=TIMEOUT_S)))
    assert health_pb2.HealthCheckResponse.FromString(first).status == health_pb2.HealthCheckResponse.SERVING


def test_health_of_an_unknown_service(channel: grpc.Channel) -> None:
    message = health_pb2.HealthCheckRequest(service="nonsense").SerializeToString()
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/grpc.health.v1.Health/Check")(message, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "path",
    [
        *sorted(REFLECTION_PATHS),
        f"/{HEALTH_SERVICE}/Check",
        f"/{HEALTH_SERVICE}/Watch",
        f"/{SERVICE}/SystemSharedMemoryStatus",
    ],
)
@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (b"\xff", INVALID, "in the encoding of protocol buffers"),
        (b"\x0a\x02\xff\xfe", INVALID, "in the encoding of protocol buffers"),
        (zlib.compress(bytes(2**20)), EXHAUSTED, "inflates to more than the limit"),
        (b"\xf8\x01\x00" * 2**15, EXHAUSTED, "98304 bytes; the limit of such a request is 65536"),
    ],
    ids=["bytes", "text", "bomb", "long"],
)
def test_broken_messages_of_other_calls(
    channel: grpc.Channel, path: str, message: bytes, status: grpc.StatusCode, text: str
) -> None:
    with refused(status, text):
        list(channel.stream_stream(path)(iter([message]), timeout=TIMEOUT_S))


@pytest.mark.parametrize("version", REFLECTION_SERVICES)
def test_reflection_as_grpcurl_uses_it(channel: grpc.Channel, version: str) -> None:
    """Lists the services, fetches the descriptors, builds messages from nothing else, and calls with them."""
    call = channel.stream_stream(
        f"/{version}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    questions = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        *(
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            for name in (SERVICE, "grpc.health.v1.Health")
        ),
    ]
    listed, *described = call(iter(questions), timeout=TIMEOUT_S)
    names = [one.name for one in listed.list_services_response.service]
    assert names == sorted([SERVICE, "grpc.health.v1.Health", REFLECTION_SERVICES[1]])
    pool = descriptor_pool.DescriptorPool()
    for answer in described:
        for data in answer.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    service = pool.FindServiceByName(SERVICE)
    assert {"ModelInfer", "ModelStreamInfer", "SystemSharedMemoryRegister"} <= {one.name for one in service.methods}
    method = service.FindMethodByName("ModelReady")
    kind, answer_kind = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    answer = channel.unary_unary(f"/{SERVICE}/ModelReady")(kind(name="matmul").SerializeToString(), timeout=TIMEOUT_S)
    assert answer_kind.FromString(answer).ready


def test_requests_are_counted_with_those_of_http(channel: grpc.Channel, http: httpx.Client) -> None:
    labels = {"op": "add", "code": "200"}
    before = total(scrape(http), "tilewire_requests_total", **labels)
    infer(channel, request_of("add", ADD))
    assert settles(http, lambda samples: total(samples, "tilewire_requests_total", **labels) == before + 1)


def test_models_that_are_not_there(channel: grpc.Channel) -> None:
    for name in ("ModelMetadata", "ModelConfig", "ModelStatistics"):
        with refused(grpc.StatusCode.NOT_FOUND, "no model 'nonsense'"):
            ask(channel, name, name="nonsense")
        with refused(grpc.StatusCode.NOT_FOUND, "no version '7'"):
            ask(channel, name, name="add", version="7")
    assert not ask(channel, "ModelReady", name="nonsense").ready
    with refused(INVALID, "not a ModelConfigRequest"):
        channel.unary_unary(f"/{SERVICE}/ModelConfig")(b"\xff", timeout=TIMEOUT_S)


def test_models_that_are_not_ready_are_not_in_an_index_of_ready_ones(channel: grpc.Channel) -> None:
    every = ask(channel, "RepositoryIndex")
    assert ask(channel, "RepositoryIndex", ready=True) == every
    assert {one.state for one in every.models} == {"READY"}


def test_cuda_shared_memory_is_empty_and_not_offered(channel: grpc.Channel) -> None:
    assert not ask(channel, "CudaSharedMemoryStatus").regions
    ask(channel, "CudaSharedMemoryUnregister")
    with refused(INVALID, "CUDA shared memory is not offered"):
        ask(channel, "CudaSharedMemoryRegister", name="r")
    with refused(grpc.StatusCode.NOT_FOUND, "'r'"):
        ask(channel, "CudaSharedMemoryStatus", name="r")

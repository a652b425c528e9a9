"""Refusals over gRPC have the status that NVIDIA's server gives for the same cause.

Sources, in triton-inference-server: `server/src/grpc/grpc_utils.cc` for the codes of its errors. For their causes
`server/src/shared_memory_manager.cc`, `server/src/grpc/infer_handler.cc`, `core/src/infer_request.cc` and
`core/src/dynamic_batch_scheduler.cc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.grpc_calls import TIMEOUT_S, ask, channel_to, infer, refused, request_of, trailing
from tests.support.live_server import LiveServer
from tests.support.shared_objects import shared_object
from tilewire.service.gateway.grpc import open_inference_pb2 as pb
from tilewire.service.gateway.grpc.paths import SERVICE
from tilewire.service.gateway.grpc.status import PUSHBACK

A = np.arange(6, dtype=np.float32).reshape(2, 3)
NOT_FOUND, INVALID = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
Change = Callable[[pb.ModelInferRequest], object]


@pytest.fixture(scope="module")
def channel(grpc_server: LiveServer) -> Iterator[grpc.Channel]:
    with channel_to(grpc_server) as channel:
        yield channel


# A model and a version that are not there.
NONSENSE = pb.ModelInferRequest(model_name="nonsense", model_version="9")


def add_request() -> pb.ModelInferRequest:
    return request_of("add", {"a": A, "b": A})


def use_region(request: pb.ModelInferRequest, name: str, byte_size: int, offset: int = 0) -> None:
    """Has the first input read from a region."""
    parameters = request.inputs[0].parameters
    parameters["shared_memory_region"].string_param = name
    parameters["shared_memory_byte_size"].int64_param = byte_size
    parameters["shared_memory_offset"].int64_param = offset
    del request.raw_input_contents[0]


@pytest.mark.parametrize(
    ("status", "text", "change"),
    [
        (NOT_FOUND, "no model 'nonsense'", lambda request: setattr(request, "model_name", "nonsense")),
        (NOT_FOUND, "no model 'nonsense'", lambda request: request.MergeFrom(NONSENSE)),
        (NOT_FOUND, "no version '9'", lambda request: setattr(request, "model_version", "9")),
        (NOT_FOUND, "no shared memory region", lambda request: use_region(request, "nonsense", A.nbytes)),
        (INVALID, "has no input 'c'", lambda request: setattr(request.inputs[1], "name", "c")),
        (INVALID, "'a' is given twice", lambda request: setattr(request.inputs[1], "name", "a")),
        (INVALID, "b: ", lambda request: (request.inputs.pop(), request.raw_input_contents.pop())),
        (INVALID, "a: datatype 'FLOAT'", lambda request: setattr(request.inputs[0], "datatype", "FLOAT")),
        (INVALID, "shape", lambda request: request.inputs[0].shape.append(2)),
        (INVALID, "24 bytes", lambda request: request.raw_input_contents.__setitem__(0, b"\0")),
        (INVALID, "beside raw_input_contents", lambda request: request.inputs[0].contents.fp32_contents.append(1)),
        (INVALID, "no output 'nonsense'", lambda request: request.outputs.add(name="nonsense")),
        (INVALID, "priority", lambda request: setattr(request.parameters["priority"], "int64_param", -1)),
        (INVALID, "timeout", lambda request: setattr(request.parameters["timeout"], "string_param", "1")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests(channel: grpc.Channel, status: grpc.StatusCode, text: str, change: Change) -> None:
    request = add_request()
    change(request)
    with refused(status, text):
        infer(channel, request)


def test_a_request_whose_time_in_the_queue_is_over(channel: grpc.Channel) -> None:
    request = add_request()
    request.parameters["timeout"].int64_param = 1
    with refused(grpc.StatusCode.UNAVAILABLE, "deadline") as errors:
        infer(channel, request)
    assert trailing(errors[0])[PUSHBACK] == "-1"


def test_a_call_whose_own_deadline_is_over(channel: grpc.Channel) -> None:
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED, ""):
        infer(channel, add_request(), timeout=-1)


def test_regions(channel: grpc.Channel) -> None:
    with shared_object(A.nbytes) as path:
        region: dict[str, Any] = {"name": "statuses", "key": f"/{path.name}", "byte_size": A.nbytes}
        with refused(INVALID, "byte_size"):
            ask(channel, "SystemSharedMemoryRegister", **{**region, "byte_size": A.nbytes + 1})
        ask(channel, "SystemSharedMemoryRegister", **region)
        try:
            with refused(grpc.StatusCode.ALREADY_EXISTS, "'statuses' is registered already"):
                ask(channel, "SystemSharedMemoryRegister", **region)
            for byte_size, offset in ((A.nbytes, 4), (4, A.nbytes), (A.nbytes + 4, 0)):
                request = add_request()
                use_region(request, "statuses", byte_size, offset)
                with refused(INVALID, "a: "):
                    infer(channel, request)
        finally:
            ask(channel, "SystemSharedMemoryUnregister", name="statuses")
    with refused(NOT_FOUND, "'statuses'"):
        ask(channel, "SystemSharedMemoryStatus", name="statuses")
    # No error there either.
    ask(channel, "SystemSharedMemoryUnregister", name="statuses")


def test_calls_that_are_not_offered(channel: grpc.Channel) -> None:
    for name in ("RepositoryModelLoad", "TraceSetting", "LogSettings"):
        with refused(grpc.StatusCode.UNIMPLEMENTED, ""):
            channel.unary_unary(f"/{SERVICE}/{name}")(b"", timeout=TIMEOUT_S)

"""Both clients against a server that speaks the contract: the same tests, awaited where they must be."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch

import tilewire
from tests.unit.client.scripted_server import answers, scripted
from tests.unit.client.speaking_server import Call, SpeakingServer, caller, on_a_socket, problem
from tilewire._arrays.host import HostArray, from_safetensors, to_safetensors
from tilewire._clients.requests import Rules

EYE = np.eye(3, dtype=np.float32)


KINDS = [tilewire.Client, tilewire.AsyncClient]


def test_matmul_of_two_arrays(call: Call, server: SpeakingServer) -> None:
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    got = call("matmul", a, EYE, bias=np.ones(3, dtype=np.float32), activation="relu", transpose_b=False)
    np.testing.assert_array_equal(got, a + 1)
    assert got.flags.writeable
    request = server.requests[0]
    assert (request.method, request.url.path) == ("POST", "/v1/matmul")
    assert dict(request.url.params) == {"activation": "relu", "transpose_b": "false"}
    assert request.headers["content-type"] == request.headers["accept"] == "application/x-safetensors"


def test_residents_are_query_parameters(call: Call, server: SpeakingServer) -> None:
    info = call("put", "weights/w1", EYE * 2)
    described = tilewire.TensorInfo(
        "weights/w1", (3, 3), "float32", 36, created="2026-11-21T09:00:00Z", hits=3, version=17
    )
    assert info.described == described
    np.testing.assert_array_equal(call("matmul", EYE, "@weights/w1"), EYE * 2)
    assert server.requests[-1].url.params["b"] == "@weights/w1"
    np.testing.assert_array_equal(call("matmul", "@weights/w1", "@weights/w1"), EYE * 4)
    assert server.requests[-1].headers["content-length"] == "0"


def test_store_keeps_the_result_there(call: Call, server: SpeakingServer) -> None:
    info = call("add", EYE, EYE, alpha=2, store="sum")
    assert (info.name, info.shape, info.dtype, info.nbytes) == ("sum", (3, 3), "float32", 36)
    assert server.requests[-1].url.params["store"] == "@sum"
    np.testing.assert_array_equal(call("get", "@sum"), EYE * 3)


def test_softmax_options(call: Call, server: SpeakingServer) -> None:
    got = call("softmax", [[0.0, 0.0]], axis=0, log=True, out_dtype=None)
    np.testing.assert_array_equal(got, [[0.0, 0.0]])
    assert dict(server.requests[0].url.params) == {"axis": "0", "log": "true"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_dtypes_beyond_numpy(call: Call, dtype: str) -> None:
    array = EYE.astype(getattr(ml_dtypes, dtype))
    call("put", "w", array)
    assert call("get", "w").dtype == array.dtype
    got = call("matmul", EYE, EYE, out_dtype=dtype)
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int32", "int64", ">f4", ">i8"])
def test_numpy_dtypes_go_as_they_are(call: Call, server: SpeakingServer, dtype: str) -> None:
    call("put", "w", np.arange(3).astype(dtype))
    assert server.tensors["w"].dtype == np.dtype(dtype).newbyteorder("=")
    assert server.tensors["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,) * 8])
def test_shapes(call: Call, shape: tuple[int, ...]) -> None:
    call("put", "w", np.ones(shape))
    assert call("get", "w").shape == shape


@pytest.mark.parametrize("dtype", ["int8", "float16", ">f4", ml_dtypes.bfloat16])
@pytest.mark.parametrize("num_rows", [4, 400_000])
def test_strided_arrays(call: Call, dtype: Any, num_rows: int) -> None:
    array = (np.arange(6 * num_rows) % 7).astype(dtype).reshape(num_rows, 6)[::2, ::-3].T
    call("put", "w", array)
    np.testing.assert_array_equal(call("get", "w"), array)


def test_an_array_of_one_element_many_times(call: Call) -> None:
    array = np.broadcast_to(np.float32(3), (300, 400))
    call("put", "w", array)
    np.testing.assert_array_equal(call("get", "w"), array)


class CountedThreads(ThreadPoolExecutor):
    """Counts the calls that it is given."""

    num_given = 0

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        self.num_given += 1
        return super().submit(function, *args, **options)


class DeviceArray:
    """An array of a library whose device the CPU cannot read. Its copies both ways are noted by thread."""

    copied_in: ClassVar[list[int]] = []
    device: ClassVar[object] = object()

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array
        self.dtype, self.nbytes = array.dtype, array.nbytes

    def __dlpack__(self) -> Any:
        raise BufferError("it is on the device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def get(self) -> np.ndarray[Any, Any]:
        self.copied_in.append(threading.get_ident())
        return self._array

    def __array_namespace__(self) -> type[DeviceArray]:
        return DeviceArray

    @classmethod
    def asarray(cls, array: np.ndarray[Any, Any], *, device: object) -> DeviceArray:
        assert device is cls.device
        cls.copied_in.append(threading.get_ident())
        return cls(array)


PROGRAM: dict[str, Any] = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, -1]}},
    "steps": [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}],
    "outputs": ["p"],
}
# Numbers of threads by what has to be done to a large array; to a small one nothing is done beside the loop.
COPIES: dict[str, tuple[int, Call]] = {
    "as it is": (0, lambda client, x: client.put("w", x)),
    "in another order": (1, lambda client, x: client.put("w", x.T)),
    "of another byte order": (1, lambda client, x: client.put("w", x.astype(">f4"))),
    "to be cast": (1, lambda client, x: client.softmax(x.astype(np.float64))),
    "beside its like": (0, lambda client, x: client.matmul(x, x.reshape(-1, len(x)))),
    "beside another dtype": (1, lambda client, x: client.add(x, np.ones(1, np.float64))),
    "beside a wide resident": (1, lambda client, x: client.add(x, tilewire.TensorInfo("w", x.shape, "float64", 8))),
    "beside a number": (1, lambda client, x: client.add(np.zeros(x.shape, np.int32), 0.5)),
    "of a program": (1, lambda client, x: client.run_program(PROGRAM, {"x": x.T})),
    "of a kept program": (1, lambda client, x: client.programs["p"](x=x.T)),
    "as a list": (1, lambda client, x: client.softmax(x.tolist())),
    "as a list that is kept": (1, lambda client, x: client.put("w", x.tolist())),
    "as a list beside an array": (1, lambda client, x: client.add(x, x.tolist())),
    "as a tuple of a program": (1, lambda client, x: client.run_program(PROGRAM, {"x": tuple(x.tolist())})),
    "of torch": (0, lambda client, x: client.softmax(torch.from_numpy(x))),
    "of torch in another order": (1, lambda client, x: client.softmax(torch.from_numpy(x.T))),
    "from a device and back": (2, lambda client, x: client.softmax(DeviceArray(x))),
}


@pytest.mark.parametrize("num_rows", [3, 1000])
@pytest.mark.parametrize("kind", COPIES)
def test_large_arrays_are_converted_and_copied_beside_the_loop(
    server: SpeakingServer, kind: str, num_rows: int
) -> None:
    num_given, use = COPIES[kind]
    array = np.arange(200 * num_rows, dtype=np.float32).reshape(num_rows, 200) / (200 * num_rows)
    threads = CountedThreads()
    server.tensors["w"] = array.astype(np.float64)
    server.programs["p"] = PROGRAM

    async def awaited() -> None:
        asyncio.get_running_loop().set_default_executor(threads)
        DeviceArray.copied_in.clear()
        cast, transport = "float32" if kind == "to be cast" else None, httpx.MockTransport(server)
        async with tilewire.AsyncClient("http://tilewire.test", cast=cast, transport=transport) as client:
            await use(client, array)

    asyncio.run(awaited())
    is_beside = num_rows == 1000
    assert threads.num_given == (num_given if is_beside else 0)
    assert (threading.get_ident() in DeviceArray.copied_in) == (kind == "from a device and back" and not is_beside)


@pytest.mark.parametrize(("num_elements", "num_pieces"), [(3, 1), (60_000, 1), (70_000, 3)])
def test_small_bodies_go_in_one_piece(num_elements: int, num_pieces: int) -> None:
    array = np.ones(num_elements, np.float32)
    call = Rules().put("w", array).call
    pieces = [call.whole()] if call.is_small else [bytes(piece) for piece in call.chunks()]
    assert len(pieces) == num_pieces
    (sent,) = from_safetensors(bytearray(b"".join(pieces))).values()
    np.testing.assert_array_equal(sent.data, array)


@pytest.mark.parametrize("method", ["softmax", "topk"])
def test_no_axis_is_not_the_last_one(call: Call, method: str) -> None:
    """NumPy and SciPy take None as every element."""
    options = {"k": 2} if method == "topk" else {}
    with pytest.raises(TypeError, match=r"axis: None is no axis; .* x\.reshape\(-1\) for all elements"):
        call(method, EYE, axis=None, **options)


def test_addresses_are_those_of_each_call(server: SpeakingServer) -> None:
    client = tilewire.Client("http://tilewire.test/behind/", transport=httpx.MockTransport(server.behind("/behind")))
    for alpha in [*range(300), 0, 1]:
        np.testing.assert_array_equal(client.add(EYE, EYE, alpha=alpha), EYE * (1 + alpha))
        assert str(server.requests[-1].url) == f"http://tilewire.test/v1/add?alpha={alpha}"
    client.put("a/b.c", EYE)
    assert server.requests[-1].url.path == "/v1/tensors/a/b.c"
    assert client.tensors()[0].name == "a/b.c"


def test_large_bodies_go_in_pieces_of_known_length(call: Call, server: SpeakingServer) -> None:
    array = np.arange(300_000, dtype=np.float64).reshape(1000, 300)
    call("put", "w", array)
    np.testing.assert_array_equal(server.tensors["w"], array)
    assert int(server.requests[0].headers["content-length"]) == len(server.requests[0].content)


def test_the_whole_answer(call: Call) -> None:
    answer = call("run", "matmul", {"a": EYE, "b": EYE}, request_id="mine")
    np.testing.assert_array_equal(answer.array, EYE)
    assert answer.request_id == "mine"
    assert answer.batch_size == 4
    assert answer.timings_ms == {"receive": 0.25, "queue": 1.0, "kernel": 0.125}
    with pytest.raises(TypeError, match="store="):
        _ = answer.stored
    stored = call("run", "matmul", {"a": EYE, "b": EYE}, store="s")
    assert stored.stored.name == "s"
    with pytest.raises(TypeError, match="@s"):
        _ = stored.array


def test_residents_are_described_listed_and_deleted(call: Call) -> None:
    assert call("tensors") == []
    assert call("head", "w") is None
    call("put", "w", EYE)
    assert call("head", "w") == tilewire.TensorInfo("w", (3, 3), "float32", 36, hits=3, version=17)
    assert [info.name for info in call("tensors")] == ["w"]
    assert call("delete", "w") is None
    with pytest.raises(tilewire.NotFound, match="no tensor 'w'"):
        call("get", "w")


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, tilewire.BadRequest),
        (401, tilewire.Unauthorized),
        (403, tilewire.Forbidden),
        (404, tilewire.NotFound),
        (412, tilewire.PreconditionFailed),
        (411, tilewire.BadRequest),
        (413, tilewire.TooLarge),
        (415, tilewire.BadRequest),
        (422, tilewire.Unprocessable),
        (500, tilewire.ServerError),
        (502, tilewire.ServerError),
        (504, tilewire.DeadlineExceeded),
        (507, tilewire.QuotaExceeded),
    ],
)
def test_errors_have_the_class_of_their_status(
    call: Call, server: SpeakingServer, status: int, kind: type[tilewire.TilewireError]
) -> None:
    server.refusals = [problem(status, "b: its inner dimension is 4")]
    with pytest.raises(tilewire.TilewireError) as raised:
        call("matmul", EYE, EYE)
    assert type(raised.value) is kind
    assert (raised.value.status, raised.value.request_id) == (status, "r-1")
    assert str(raised.value) == raised.value.detail == "b: its inner dimension is 4"
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("content", "detail"),
    [
        ({"text": "upstream gone"}, "upstream gone"),
        ({"json": {"error": "no such model"}}, "no such model"),
        ({"json": ["x"]}, '["x"]'),
        ({}, "status 500"),
    ],
)
def test_errors_that_are_no_problem_documents(call: Call, server: SpeakingServer, content: Any, detail: str) -> None:
    server.refusals = [httpx.Response(500, **content)]
    with pytest.raises(tilewire.ServerError) as raised:
        call("matmul", EYE, EYE)
    assert raised.value.detail == detail


@pytest.mark.parametrize("status", [429, 503])
def test_refusals_are_tried_again_with_the_whole_body(call: Call, server: SpeakingServer, status: int) -> None:
    server.refusals = [problem(status, "full", **{"Retry-After": "0"})] * 2
    np.testing.assert_array_equal(call("matmul", EYE, EYE), EYE)
    assert len(server.requests) == 3
    assert len({request.content for request in server.requests}) == 1


def test_retry_after_is_waited(call: Call, server: SpeakingServer) -> None:
    server.refusals = [problem(429, "full", **{"Retry-After": "1"})]
    began = time.monotonic()
    call("matmul", EYE, EYE)
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(("status", "kind"), [(429, tilewire.Busy), (503, tilewire.Unavailable)])
def test_retries_end(call: Call, server: SpeakingServer, status: int, kind: type[tilewire.TilewireError]) -> None:
    server.refusals = [problem(status, "full", **{"Retry-After": "0"})] * 3
    with pytest.raises(kind) as raised:
        call("matmul", EYE, EYE)
    assert raised.value.retry_after_s == 0
    assert len(server.requests) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_no_retries_when_none_are_wanted(kind: Callable[..., Any], server: SpeakingServer) -> None:
    server.refusals = [problem(503, "starting")]
    with pytest.raises(tilewire.Unavailable):
        caller(kind, server, max_retries=0)("softmax", EYE)
    assert len(server.requests) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_headers_of_the_client(kind: Callable[..., Any], server: SpeakingServer) -> None:
    caller(kind, server, api_key="secret", headers={"X-Team": "blue"})("tensors")
    headers = server.requests[0].headers
    assert headers["authorization"] == "Bearer secret"
    assert headers["x-team"] == "blue"
    assert headers["accept-encoding"] == "identity"


@pytest.mark.parametrize("kind", KINDS)
def test_no_connection(kind: Callable[..., Any]) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    call = caller(kind, refuse)
    with pytest.raises(tilewire.ConnectionFailed, match=r"tilewire\.test.*refused"):
        call("matmul", EYE, EYE)
    assert call("ready") is call("live") is False
    with pytest.raises(tilewire.Unavailable, match="not ready within 0 s"):
        call("wait_ready", 0)


def test_waiting_for_ready(call: Call, server: SpeakingServer) -> None:
    server.is_ready_after = 3
    assert call("ready") is False
    call("wait_ready", 10.0)
    assert len(server.requests) == 4
    assert call("live") is True


@pytest.mark.parametrize("name", ["", "a//b", "../a", "a/../b", "/a", "a/", "a b", "@", "ü", "a/./b"])
def test_names_that_cannot_be(call: Call, server: SpeakingServer, name: str) -> None:
    with pytest.raises(ValueError, match=r"name: .* cannot name a tensor"):
        call("get", name)
    with pytest.raises(ValueError, match=r"a: .* cannot name a tensor"):
        call("add", f"@{name}", EYE)
    with pytest.raises(ValueError, match=r"store: .* cannot name a tensor"):
        call("add", EYE, EYE, store=name)
    assert server.requests == []


def test_operands_that_are_no_arrays(call: Call) -> None:
    with pytest.raises(TypeError, match="resident tensor"):
        call("matmul", "weights/w1", EYE)
    with pytest.raises(TypeError, match="dtype object cannot be sent"):
        call("matmul", np.array([object()]), EYE)


@pytest.mark.parametrize("value", [[1, "2"], [[1.0, 2], [3, None]], [1, 2j], [1.5, {}], [1, [2]]])
def test_lists_hold_numbers_alone(call: Call, server: SpeakingServer, value: Any) -> None:
    operands: list[tuple[Any, ...]] = [("softmax", value), ("add", EYE[:2], value), ("matmul", EYE, EYE)]
    for method, *arguments in operands:
        name = {"softmax": "x", "add": "b", "matmul": "bias"}[method]
        options = {"bias": value} if method == "matmul" else {}
        with pytest.raises(TypeError, match=f"{name}: a list "):
            call(method, *arguments, **options)
    assert not server.requests
    assert call("add", [1, 2], 10**30).tolist() == [np.float32(10**30)] * 2


def test_operands_that_are_missing(call: Call, server: SpeakingServer) -> None:
    for method, arguments, name in (("softmax", (None,), "x"), ("matmul", (EYE, None), "b"), ("topk", (None, 1), "x")):
        with pytest.raises(TypeError, match=f"{name}: expected an array, .*got None"):
            call(method, *arguments)
    with pytest.raises(TypeError, match="array: dtype object cannot be sent"):
        call("put", "w", None)
    assert not server.requests


def test_an_answer_that_is_not_safetensors(call: Call, server: SpeakingServer) -> None:
    server.refusals = [httpx.Response(200, content=b"<html>")]
    with pytest.raises(tilewire.ServerError, match="safetensors"):
        call("matmul", EYE, EYE)


DEEP = b"[" * 100_000
JSON = {"Content-Type": "application/json"}
TENSOR = {"name": "w", "shape": [2], "dtype": "float32", "bytes": 8}
ODD: list[dict[str, Any]] = [
    {"version": "v2"},
    {"dtype": None},
    {"dtype": {}},
    {"shape": "2"},
    {"shape": [2.5]},
    {"name": 5},
]


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        *((("tensors",), {"json": [{**TENSOR, **odd}]}) for odd in ODD),
        (("head", "w"), {"headers": {"X-Tensor-Dtype": "float32", "X-Tensor-Bytes": "8 B"}}),
        (("head", "w"), {"headers": {"X-Tensor-Dtype": "float32", "X-Tensor-Hits": "1e6"}}),
        (("programs",), {"json": [{"title": "p"}]}),
        (("programs",), {"json": [5]}),
        (("tensors",), {"content": DEEP, "headers": JSON}),
        (("tensors",), {"content": DEEP, "headers": JSON, "status_code": 500}),
        (("softmax", EYE), {"content": len(DEEP).to_bytes(8, "little") + DEEP}),
    ],
)
def test_fields_that_cannot_be_are_the_server_s_error(
    call: Call, server: SpeakingServer, arguments: tuple[Any, ...], answer: dict[str, Any]
) -> None:
    server.refusals = [httpx.Response(**{"status_code": 200, **answer})]
    with pytest.raises(tilewire.ServerError):
        call(*arguments)


@pytest.mark.parametrize("text", ["queue;dur=.", "queue;dur=1.2.3", "queue;dur=1e-3", "queue;dur=x"])
def test_timings_that_cannot_be_are_left_out(call: Call, server: SpeakingServer, text: str) -> None:
    body = b"".join(to_safetensors({"out": HostArray.of(EYE)}))
    server.refusals = [httpx.Response(200, content=body, headers={"Server-Timing": f"{text}, kernel;dur=2"})]
    assert call("run", "softmax", {"x": EYE}).timings_ms == {"kernel": 2.0}


def test_a_handle_of_a_dtype_that_only_the_server_knows(call: Call, server: SpeakingServer) -> None:
    server.refusals = [httpx.Response(200, json=[{**TENSOR, "name": "new", "dtype": "float4"}])]
    (handle,) = call("tensors")
    assert handle.dtype == "float4"
    # What it does with it is the server's word: here that there is no such tensor.
    with pytest.raises(tilewire.NotFound, match="new"):
        call("softmax", handle)


def test_lists_for_a_dtype_that_only_the_server_knows(call: Call) -> None:
    steps = [{"op": "softmax", "inputs": {"x": "x"}, "as": "y"}]
    program = {"inputs": {"x": {"dtype": "float4", "shape": [2]}}, "steps": steps, "outputs": ["y"]}
    with pytest.raises(TypeError, match="x: float4 is none of the dtypes that this client knows"):
        call("run_program", program, {"x": [1.0, 2.0]})


PAGE = "<!doctype html><html><title>Sign in</title><body>Your name and password, please.</body></html>"
CALLS: list[tuple[Any, ...]] = [
    ("put", "w", EYE),
    ("get", "w"),
    ("head", "w"),
    ("delete", "w"),
    ("tensors",),
    ("programs",),
    ("softmax", EYE),
    ("softmax", "@w"),
    ("program", "p", {"inputs": {}, "steps": [], "outputs": []}),
]


def foreign(status: int) -> httpx.Response:
    place = {"Location": "https://tilewire.test/v1"} if 300 <= status < 400 else {}
    return httpx.Response(status, html=PAGE, headers=place)


@pytest.mark.parametrize("arguments", CALLS, ids=lambda arguments: arguments[0])
@pytest.mark.parametrize("status", [200, 201, 204, 301, 302, 307, 308])
def test_answers_of_another_server_are_errors(
    call: Call, server: SpeakingServer, arguments: tuple[Any, ...], status: int
) -> None:
    if status == 204 and arguments[0] == "delete":
        return
    server.refusals = [foreign(status)]
    with pytest.raises(tilewire.ServerError) as raised:
        call(*arguments)
    assert raised.value.status == status
    if status < 300:
        assert "is this the address of a Tilewire server?" in raised.value.detail
    if status >= 300:
        assert "redirects to https://tilewire.test/v1; give the address" in raised.value.detail
    assert "<" not in raised.value.detail
    assert len(server.requests) == 1


@pytest.mark.parametrize("name", ["w.npy", "w.safetensors"])
@pytest.mark.parametrize("status", [200, 302])
def test_a_page_of_another_server_is_not_written(
    call: Call, server: SpeakingServer, tmp_path: Path, name: str, status: int
) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    server.refusals = [foreign(status)]
    with pytest.raises(tilewire.ServerError):
        call("get_file", "w", path)
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [(name, b"old")]


@pytest.mark.parametrize("status", [200, 302])
def test_another_server_is_not_ready(call: Call, server: SpeakingServer, status: int) -> None:
    server.refusals = [foreign(status) for _ in range(3)]
    assert call("live") is call("ready") is False
    with pytest.raises(tilewire.Unavailable, match=r"not ready within 0 s: .*(text/html|redirects to https)"):
        call("wait_ready", 0)


def test_waiting_names_the_last_reason(call: Call, server: SpeakingServer) -> None:
    server.is_ready_after = 100
    with pytest.raises(tilewire.Unavailable, match="no engine is ready: warming up"):
        call("wait_ready", 0)


@pytest.mark.parametrize(("status", "detail"), [(502, "status 502: Bad Gateway"), (599, "status 599")])
def test_error_pages_have_no_tags(call: Call, server: SpeakingServer, status: int, detail: str) -> None:
    for page in ({"html": PAGE}, {"text": PAGE}):
        server.refusals = [httpx.Response(status, **page)]  # type: ignore[arg-type]
        with pytest.raises(tilewire.ServerError) as raised:
            call("matmul", EYE, EYE)
        assert raised.value.detail.startswith(f"{detail}, with a web page, so by a proxy or another server; ")
        assert raised.value.detail.endswith("HTTP_PROXY and NO_PROXY")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_own", [True, False], ids=["sockets", "httpx"])
@pytest.mark.parametrize("length", [2**60, 2**100])
def test_a_length_beyond_memory(kind: Callable[..., Any], is_own: bool, length: int) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/x-safetensors\r\nContent-Length: {length}\r\n\r\n".encode()
    with scripted(answers(head)) as url:
        settings: dict[str, Any] = {"transport": None, "timeout": 10 if is_own else httpx.Timeout(10)}
        with pytest.raises(tilewire.TilewireError, match=r"does not fit into memory|bad Content-Length"):
            caller(kind, SpeakingServer(), base_url=url, max_retries=0, **settings)("softmax", EYE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_whose_length_is_not_said(kind: Callable[..., Any], tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-npy\r\nTransfer-Encoding: chunked\r\n\r\n"
    with scripted(answers(head + b"3\r\nabc\r\n0\r\n\r\n")) as url:
        written = caller(kind, SpeakingServer(), base_url=url, transport=None)("get_file", "w", tmp_path / "w.npy")
    assert written.read_bytes() == b"abc"


@pytest.mark.parametrize("copy", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_have_connections_of_their_own(
    kind: Callable[..., Any], server: SpeakingServer, copy: Callable[[Any], Any]
) -> None:
    with on_a_socket(server) as url:
        client = kind(url, api_key="secret", cast="float32", max_retries=1)
        caller(lambda **_: client, server)("put", "w", EYE)
        twin = copy(client)
        call = caller(lambda **_: twin, server)
        np.testing.assert_array_equal(call("matmul", EYE.astype(np.float64), "@w"), EYE)
        assert server.requests[-1].headers["authorization"] == "Bearer secret"
        assert twin._transport.get() is not client._transport.get()
        assert twin.tensors._client is twin
        for handle in (client.tensors["w"], client.programs["p"]):
            assert copy(handle).name == handle.name
            assert copy(handle)._client._base_url == url
        for one in (client, twin):
            caller(lambda one=one, **_: one, server)("close" if kind is tilewire.Client else "aclose")


def test_a_transport_that_cannot_be_pickled_says_so(server: SpeakingServer) -> None:
    client = tilewire.Client(transport=httpx.MockTransport(lambda request: server(request)))
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        pickle.dumps(client)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"base_url": None}, TypeError, "base_url: expected an address"),
        ({"base_url": "http://h?a=1"}, ValueError, "has a query or a fragment; type 'http://h'"),
        ({"base_url": "http://h:1/p q"}, ValueError, "has a path that HTTP cannot carry; type 'http://h:1/p%20q'"),
        ({"base_url": "http://h/p#a"}, ValueError, "has a query or a fragment; type 'http://h/p'"),
        ({"base_url": "http://me:geheim@h"}, ValueError, "holds a name or a password"),
        ({"base_url": "https://me:geheim@[::1"}, ValueError, "holds a name or a password"),
        ({"base_url": "me:geheim@h:1"}, ValueError, "holds a name or a password"),
        ({"timeout": 0}, ValueError, "timeout: expected more than 0 s, or None"),
        ({"timeout": float("inf")}, ValueError, "timeout: .*None for no limit; got inf"),
        ({"timeout": float("nan")}, ValueError, "timeout: "),
        ({"timeout": "60"}, TypeError, "timeout: expected seconds"),
        ({"max_retries": "2"}, TypeError, "max_retries: expected a number; got '2'"),
        ({"max_retries": -1}, ValueError, "max_retries: expected 0 or more; got -1"),
        ({"headers": {"X-Team": 1}}, TypeError, "headers: expected texts by name"),
        ({"headers": [("X-Team", "a")]}, TypeError, "headers: expected texts by name"),
        ({"headers": {"X-Team": "\u2603"}}, ValueError, "X-Team: a header has one line of printable ASCII letters"),
        ({"headers": {"X-Team": "geheim\r\nX-Other: b"}}, ValueError, "X-Team: a header has one line"),
        ({"headers": {"X Team": "geheim"}}, ValueError, "headers: 'X Team' cannot name a header"),
        ({"api_key": "geheim\nX-Other: b"}, ValueError, "api_key: a header has one line"),
        ({"api_key": b"geheim"}, TypeError, "api_key: expected a text, got bytes"),
        ({"headers": {"Authorization": "Bearer geheim\n"}}, ValueError, "Authorization: a header has one line"),
    ],
)
def test_settings_that_cannot_be(
    kind: Callable[..., Any], settings: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        kind(**settings)
    assert "geheim" not in str(raised.value)


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_is_taken_without_the_blanks_around_it(kind: Callable[..., Any]) -> None:
    assert repr(kind(" http://h:1/gpu/ \n")).endswith("Client('http://h:1/gpu')")


def test_the_argument_is_named(call: Call, server: SpeakingServer) -> None:
    with pytest.raises(TypeError, match="store: expected a text, got 3"):
        call("add", EYE, EYE, store=3)
    with pytest.raises(TypeError, match="out_dtype: 'flaot' is no dtype"):
        call("add", EYE, EYE, out_dtype="flaot")
    for request_id in ("\u2603", "a\r\nX-Other: b", "a\0"):
        with pytest.raises(ValueError, match="request_id: a header has one line"):
            call("add", EYE, EYE, request_id=request_id)
    assert not server.requests


@pytest.mark.parametrize("method", ["put", "get", "head", "delete", "program"])
def test_names_are_texts(call: Call, server: SpeakingServer, method: str) -> None:
    rest = {"put": (EYE,), "program": ({"inputs": {}, "steps": [], "outputs": []},)}.get(method, ())
    with pytest.raises(TypeError, match="name: expected a text, got 3"):
        call(method, 3, *rest)
    assert not server.requests


def test_both_close_with_their_block(server: SpeakingServer) -> None:
    async def use() -> None:
        async with tilewire.AsyncClient(transport=httpx.MockTransport(server)) as client:
            assert await client.live()

    asyncio.run(use())
    with tilewire.Client(transport=httpx.MockTransport(server)) as client:
        assert client.live()

"""A server behind httpx's transport seam that speaks the HTTP contract and computes with NumPy."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import safetensors.numpy

from tests.unit.gateway.codecs.arena_room import decode
from tilewire.service.gateway.codecs.safetensors import Safetensors
from tilewire.service.match import is_match, parse_match
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.registry import OPS as REGISTRY

Array = np.ndarray[Any, Any]
Call = Callable[..., Any]

METRICS = """\
# HELP tilewire_requests_total Requests.
tilewire_requests_total{{op="matmul",code="200"}} {twice}
tilewire_requests_total{{op="matmul",code="429"}} {count}
tilewire_rejected_total{{reason="queue"}} {count}
tilewire_request_duration_seconds_bucket{{op="matmul",le="0.001"}} {count} # {{trace_id="x"}} 0.001 1.0
tilewire_request_duration_seconds_bucket{{op="matmul",le="0.01"}} {twice}
tilewire_request_duration_seconds_bucket{{op="matmul",le="+Inf"}} {twice}
tilewire_flops_total{{op="matmul",dtype="float32"}} {twice}e12
tilewire_kernel_seconds_total{{op="matmul",dtype="float32"}} {count}
tilewire_in_flight_requests 3
tilewire_engine_up{{device="cpu"}} 1
tilewire_resident_bytes 1048576
"""


def problem(status: int, detail: str, **headers: str) -> httpx.Response:
    document = {"type": "about:blank", "title": "x", "status": status, "detail": detail, "request_id": "r-1"}
    return httpx.Response(status, json=document, headers={"X-Request-Id": "r-1", **headers})


class SpeakingServer:
    """Answers like Tilewire; keeps every request that came, and first gives the answers in `refusals`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Array] = {}
        self.versions: dict[str, int] = {}
        self.programs: dict[str, Any] = {}
        self.requests: list[httpx.Request] = []
        self.refusals: list[httpx.Response] = []
        # Requests that are refused, and those that are done and answered 500.
        self.refuses: Callable[[httpx.Request], bool] = lambda _: False
        self.loses: Callable[[httpx.Request], bool] = lambda _: False
        self.is_ready_after = 0
        self.needs_key = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        assert len(request.content) == int(request.headers.get("content-length", "0"))
        assert "transfer-encoding" not in request.headers
        if self.refusals:
            return self.refusals.pop(0)
        if self.refuses(request):
            return problem(400, "refused")
        reply = self.reply(request)
        return problem(500, "lost") if self.loses(request) else reply

    def reply(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path.startswith("/v2/health/"):
            self.is_ready_after -= 1
            if self.is_ready_after < 0:
                return httpx.Response(200, json={path.rpartition("/")[2]: True})
            return httpx.Response(503, json={"ready": False, "error": "no engine is ready: warming up"})
        if path == "/v2" and self.needs_key:
            return problem(401, "key: send one")
        if path == "/v2":
            engine = {"device": "cpu", "device_name": "a processor", "backend": "cpu"}
            return httpx.Response(200, json={"name": "tilewire", "version": "0", "engines": [engine]})
        if path == "/metrics":
            return httpx.Response(200, text=self.metrics())
        if path == "/v1/tensors":
            return httpx.Response(200, json=[self.describe(name) for name in self.tensors])
        if path.startswith("/v1/tensors/"):
            return self.resident(request, path.removeprefix("/v1/tensors/"))
        if path == "/v1/programs":
            return httpx.Response(200, json=[{"name": name} for name in self.programs])
        if path.startswith("/v1/programs/"):
            return self.program(request, path.removeprefix("/v1/programs/"))
        if path == "/v1/run":
            text = json.loads(request.content[8 : 8 + int.from_bytes(request.content[:8], "little")])["__metadata__"]
            return self.run(request, json.loads(text["program"]))
        return self.op(request, path.removeprefix("/v1/"))

    def metrics(self) -> str:
        count = len(self.requests)
        return METRICS.format(count=count, twice=2 * count, seconds=count * 0.01)

    def program(self, request: httpx.Request, name: str) -> httpx.Response:
        if request.method == "PUT":
            assert request.headers["content-type"] == "application/json"
            status = 200 if name in self.programs else 201
            self.programs[name] = json.loads(request.content)
            # As far as the service has the ops, its own parser reads what the client writes.
            if {step["op"] for step in self.programs[name]["steps"]} <= REGISTRY.keys():
                parse_program(request.content, REGISTRY)
            described = {"name": name, "version": FIRST_VERSION, **self.programs[name]}
            return httpx.Response(status, json={**described, "steps": len(self.programs[name]["steps"])})
        if name not in self.programs:
            return problem(404, f"name: no program {name!r}")
        if request.method == "DELETE":
            del self.programs[name]
            return httpx.Response(204)
        return (
            httpx.Response(200, json=self.programs[name])
            if request.method == "GET"
            else self.run(request, self.programs[name])
        )

    def run(self, request: httpx.Request, program: Any) -> httpx.Response:
        values = load(request.content) if request.content else {}
        values |= {name: self.tensors[value[1:]] for name, value in request.url.params.items()}
        assert set(values) == set(program["inputs"])
        for name, spec in program["inputs"].items():
            assert values[name].dtype.name == spec["dtype"]
        for step in program["steps"]:
            inputs = {
                name: self.tensors[value[1:]] if value.startswith("@") else values[value]
                for name, value in step["inputs"].items()
            }
            results = OPS[step["op"]](inputs, {name: text_of(value) for name, value in step.get("options", {}).items()})
            names = [step["as"]] if isinstance(step["as"], str) else step["as"]
            values |= dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))
        return answer({name: np.asarray(values[name]) for name in program["outputs"]})

    def behind(self, prefix: str) -> Callable[[httpx.Request], httpx.Response]:
        """The same behind a proxy that takes `prefix` off its paths."""

        def answer(request: httpx.Request) -> httpx.Response:
            assert request.url.path.startswith(f"{prefix}/")
            request.url = request.url.copy_with(path=request.url.path.removeprefix(prefix))
            return self(request)

        return answer

    def describe(self, name: str) -> dict[str, object]:
        tensor = self.tensors[name]
        times = {"created": "2026-11-21T09:00:00Z", "last_used": None, "hits": 3, "version": self.version_of(name)}
        return {"name": name, "shape": tensor.shape, "dtype": tensor.dtype.name, "bytes": tensor.nbytes, **times}

    def version_of(self, name: str) -> int:
        """The version of a resident, also of one that a test put there itself."""
        return self.versions.setdefault(name, FIRST_VERSION)

    def keep(self, name: str, tensor: Array) -> httpx.Response:
        status = 200 if name in self.tensors else 201
        self.tensors[name] = tensor
        self.versions[name] = self.versions.get(name, FIRST_VERSION - 1) + 1
        return httpx.Response(status, json=self.describe(name), headers={"ETag": f'"{self.versions[name]}"'})

    def is_as_demanded(self, request: httpx.Request, name: str) -> bool:
        """Whether a resident has the version that the request demands, by the service's own reader."""
        version = self.version_of(name) if name in self.tensors else None
        return is_match(parse_match(request.headers.get("if-match")), version)

    def resident(self, request: httpx.Request, name: str) -> httpx.Response:
        if name not in self.tensors and request.method != "PUT":
            return problem(404, f"name: no tensor {name!r}")
        if not self.is_as_demanded(request, name):
            return problem(412, f"if-match: {name!r} has version {self.versions.get(name)}")
        if request.method == "PUT":
            return self.keep(name, *load(request.content).values())
        if request.method == "HEAD":
            tensor = self.tensors[name]
            shape = ",".join(map(str, tensor.shape))
            described = {"shape": shape, "dtype": tensor.dtype.name, "bytes": str(tensor.nbytes), "hits": "3"}
            headers = {f"X-Tensor-{key}": value for key, value in described.items()}
            return httpx.Response(200, headers={**headers, "ETag": f'"{self.version_of(name)}"'})
        if request.method == "DELETE":
            del self.tensors[name]
            return httpx.Response(204)
        if request.headers["accept"] == "application/x-npy":
            return npy_answer(self.tensors[name])
        return answer({name: self.tensors[name]})

    def op(self, request: httpx.Request, op: str) -> httpx.Response:
        query = dict(request.url.params)
        missing = [value for value in query.values() if value.startswith("@") and value[1:] not in self.tensors]
        if missing and "store" not in query:
            return problem(404, f"no tensor {missing[0]!r}")
        residents = {name: query.pop(name)[1:] for name in list(query) if name in INPUTS}
        if not all(self.is_as_demanded(request, name) for name in residents.values()):
            return problem(412, "if-match: a resident has another version")
        inputs = load(request.content) if request.content else {}
        inputs |= {name: self.tensors[resident] for name, resident in residents.items()}
        store, out = query.pop("store", None), OPS[op](inputs, query)
        if isinstance(out, tuple):
            return answer(dict(zip(("values", "indices"), out, strict=True)))
        if store is not None:
            return httpx.Response(201, content=self.keep(store[1:], out).content, headers=JSON)
        headers = {"X-Request-Id": request.headers.get("x-request-id", "made"), "X-Batch-Size": "4"}
        headers["Server-Timing"] = 'receive;dur=0.25, queue;dur=1, kernel;desc="k";dur=0.125'
        return answer({"out": out}, **headers)


def matmul(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    a, b = inputs["a"], inputs["b"]
    out = (a.astype(np.float64) @ b.astype(np.float64)) + inputs.get("bias", 0)
    out = np.maximum(out, 0) if query.get("activation") == "relu" else out
    out = 1 / (1 + np.exp(-out)) if query.get("activation") == "sigmoid" else out
    return np.asarray(out.astype(getattr(ml_dtypes, query.get("out_dtype", ""), query.get("out_dtype", a.dtype))))


def softmax(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    x = inputs["x"]
    out = np.exp(x) / np.exp(x).sum(axis=int(query.get("axis", "-1")), keepdims=True)
    return np.asarray(np.log(out) if query.get("log") == "true" else out)


def add(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    total: Array = inputs["a"] + inputs["a"].dtype.type(query.get("alpha", "1")) * inputs["b"]
    return total


def search(inputs: dict[str, Array], query: dict[str, str]) -> tuple[Array, Array]:
    scores = inputs["a"].astype(np.float32) @ inputs["b"].astype(np.float32).T + inputs.get("bias", 0)
    return topk({"x": scores}, {"k": query["k"]})


def topk(inputs: dict[str, Array], query: dict[str, str]) -> tuple[Array, Array]:
    x, k, axis = inputs["x"], int(query["k"]), int(query.get("axis", "-1"))
    order = np.argsort(x if query.get("largest") == "false" else -x, axis=axis, kind="stable")
    indices = np.take(order, range(k), axis=axis).astype(np.int64)
    return np.take_along_axis(x, indices, axis), indices


def reduce(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    axis = None if query.get("axis", "-1") == "all" else int(query.get("axis", "-1"))
    kind = {"norm": np.linalg.norm}.get(query["kind"]) or getattr(np, query["kind"])
    out = kind(inputs["x"], axis=axis, keepdims=query.get("keepdims") == "true")
    return np.asarray(out, np.int64 if query["kind"].startswith("arg") else inputs["x"].dtype)


def normalize(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    x, eps = inputs["x"], float(query.get("eps", "1e-5"))
    assert query["kind"] == "layer"
    out = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return np.asarray(out * inputs.get("weight", 1) + inputs.get("bias", 0), x.dtype)


def pointwise(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    x, y = inputs["x"], inputs.get("y", np.empty(0))
    named: dict[str, Callable[[], Array]] = {
        "mul": lambda: x * y,
        "div": lambda: x / y,
        "maximum": lambda: np.maximum(x, y),
        "minimum": lambda: np.minimum(x, y),
        "relu": lambda: np.maximum(x, 0),
        "sigmoid": lambda: 1 / (1 + np.exp(-x)),
        "neg": lambda: -x,
        "rsqrt": lambda: 1 / np.sqrt(x),
    }
    fn = named.get(query["fn"]) or (lambda: getattr(np, query["fn"])(x))
    return np.asarray(fn() * float(query.get("scale", "1")) + float(query.get("shift", "0")), x.dtype)


FIRST_VERSION = 17
JSON = {"Content-Type": "application/json"}
INPUTS = ("a", "b", "x", "y", "bias", "weight")
OPS: dict[str, Callable[[dict[str, Array], dict[str, str]], Any]] = {
    "matmul": matmul,
    "softmax": softmax,
    "add": add,
    "search": search,
    "topk": topk,
    "reduce": reduce,
    "normalize": normalize,
    "pointwise": pointwise,
}


def text_of(value: object) -> str:
    """An option of a program as a query would carry it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def on_a_socket(answer: Callable[[httpx.Request], httpx.Response]) -> Iterator[str]:
    """The same server behind real sockets; its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", "0")))
            request = httpx.Request(
                self.command, f"http://tilewire.test{self.path}", headers=self.headers.items(), content=body
            )
            response = answer(request)
            self.send_response(response.status_code)
            for name, value in response.headers.items():
                if name != "content-length":
                    self.send_header(name, value)
            if response.status_code != 204:
                self.send_header("Content-Length", str(len(response.content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(response.content)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            # A client that left: its trace would stand among what a command prints.
            if not isinstance(sys.exception(), ConnectionError):
                super().handle_error(request, client_address)

    server = Server(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def load(body: bytes) -> dict[str, Array]:
    """Read by the gateway's own codec: what the client writes is what the server takes."""
    return decode(Safetensors(), body)


def answer(tensors: dict[str, Array], **headers: str) -> httpx.Response:
    body = safetensors.numpy.save(tensors)
    return httpx.Response(200, content=body, headers={"Content-Type": "application/x-safetensors", **headers})


def npy_answer(tensor: Array) -> httpx.Response:
    file = io.BytesIO()
    np.save(file, tensor, allow_pickle=False)
    return httpx.Response(200, content=file.getvalue(), headers={"Content-Type": "application/x-npy"})


def caller(kind: Callable[..., Any], server: Callable[[httpx.Request], httpx.Response], **settings: Any) -> Call:
    """Makes what calls a method of a new client of a kind, and awaits it where it must be."""
    settings = {"base_url": "http://tilewire.test", "transport": httpx.MockTransport(server), **settings}
    client = kind(**settings)

    def call(method: str, *args: Any, **options: Any) -> Any:
        result = getattr(client, method)(*args, **options)
        return asyncio.run(result) if inspect.iscoroutine(result) else result

    return call

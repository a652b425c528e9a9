"""A server behind httpx's transport seam that speaks the HTTP contract and computes with NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import safetensors.numpy

from tests.unit.gateway.codecs.arena_room import decode
from tilewire.service.gateway.codecs.safetensors import Safetensors

Array = np.ndarray[Any, Any]


def problem(status: int, detail: str, **headers: str) -> httpx.Response:
    document = {"type": "about:blank", "title": "x", "status": status, "detail": detail, "request_id": "r-1"}
    return httpx.Response(status, json=document, headers={"X-Request-Id": "r-1", **headers})


class SpeakingServer:
    """Answers like Tilewire; keeps every request that came, and first gives the answers in `refusals`."""

    def __init__(self) -> None:
        self.tensors: dict[str, Array] = {}
        self.requests: list[httpx.Request] = []
        self.refusals: list[httpx.Response] = []
        self.is_ready_after = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        assert len(request.content) == int(request.headers.get("content-length", "0"))
        assert "transfer-encoding" not in request.headers
        if self.refusals:
            return self.refusals.pop(0)
        path = request.url.path
        if path.startswith("/v2/health/"):
            self.is_ready_after -= 1
            return httpx.Response(200 if self.is_ready_after < 0 else 503, json={})
        if path == "/v1/tensors":
            return httpx.Response(200, json=[self.describe(name) for name in self.tensors])
        if path.startswith("/v1/tensors/"):
            return self.resident(request, path.removeprefix("/v1/tensors/"))
        return self.op(request, path.removeprefix("/v1/"))

    def behind(self, prefix: str) -> Callable[[httpx.Request], httpx.Response]:
        """The same behind a proxy that takes `prefix` off its paths."""

        def answer(request: httpx.Request) -> httpx.Response:
            assert request.url.path.startswith(f"{prefix}/")
            request.url = request.url.copy_with(path=request.url.path.removeprefix(prefix))
            return self(request)

        return answer

    def describe(self, name: str) -> dict[str, object]:
        tensor = self.tensors[name]
        times = {"created": "2026-11-21T09:00:00Z", "last_used": None, "hits": 3}
        return {"name": name, "shape": tensor.shape, "dtype": tensor.dtype.name, "bytes": tensor.nbytes, **times}

    def resident(self, request: httpx.Request, name: str) -> httpx.Response:
        if request.method == "PUT":
            status = 200 if name in self.tensors else 201
            (self.tensors[name],) = load(request.content).values()
            return httpx.Response(status, json=self.describe(name))
        if name not in self.tensors:
            return problem(404, f"name: no tensor {name!r}")
        if request.method == "HEAD":
            tensor = self.tensors[name]
            shape = ",".join(map(str, tensor.shape))
            described = {"shape": shape, "dtype": tensor.dtype.name, "bytes": str(tensor.nbytes), "hits": "3"}
            return httpx.Response(200, headers={f"X-Tensor-{key}": value for key, value in described.items()})
        if request.method == "DELETE":
            del self.tensors[name]
            return httpx.Response(204)
        return answer({name: self.tensors[name]})

    def op(self, request: httpx.Request, op: str) -> httpx.Response:
        query = dict(request.url.params)
        inputs = load(request.content) if request.content else {}
        inputs |= {name: self.tensors[query.pop(name)[1:]] for name in list(query) if name in ("a", "b", "x", "bias")}
        store, out = query.pop("store", None), OPS[op](inputs, query)
        if store is not None:
            self.tensors[store[1:]] = out
            return httpx.Response(201, json=self.describe(store[1:]))
        headers = {"X-Request-Id": request.headers.get("x-request-id", "made"), "X-Batch-Size": "4"}
        headers["Server-Timing"] = 'receive;dur=0.25, queue;dur=1, kernel;desc="k";dur=0.125'
        return answer({"out": out}, **headers)


def matmul(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    a, b = inputs["a"], inputs["b"]
    out = (a.astype(np.float64) @ b.astype(np.float64)) + inputs.get("bias", 0)
    out = np.maximum(out, 0) if query.get("activation") == "relu" else out
    return np.asarray(out.astype(getattr(ml_dtypes, query.get("out_dtype", ""), query.get("out_dtype", a.dtype))))


def softmax(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    x = inputs["x"]
    out = np.exp(x) / np.exp(x).sum(axis=int(query.get("axis", "-1")), keepdims=True)
    return np.asarray(np.log(out) if query.get("log") == "true" else out)


def add(inputs: dict[str, Array], query: dict[str, str]) -> Array:
    total: Array = inputs["a"] + inputs["a"].dtype.type(query.get("alpha", "1")) * inputs["b"]
    return total


OPS: dict[str, Callable[[dict[str, Array], dict[str, str]], Array]] = {"matmul": matmul, "softmax": softmax, "add": add}


def load(body: bytes) -> dict[str, Array]:
    """Read by the gateway's own codec: what the client writes is what the server takes."""
    return decode(Safetensors(), body)


def answer(tensors: dict[str, Array], **headers: str) -> httpx.Response:
    body = safetensors.numpy.save(tensors)
    return httpx.Response(200, content=body, headers={"Content-Type": "application/x-safetensors", **headers})

"""The calls that a soak sends, each with a check of its answer. A further op or program is one entry of `CALLS`.

Products and sums are of small integers, so that their answers are exact whatever the order of the sums. Equal scores
are frequent among them.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import httpx
import numpy as np

from tests.support.oip_bodies import LENGTH, from_answer, text_input, to_binary
from tests.support.raw_http import Answer, head
from tests.support.shared_objects import shared_object
from tests.support.tensor_bodies import TYPES, Array, decode, encode, from_safetensors

# NumPy reads the header of npy by `ast`, which fails between threads in some releases of Python 3.11.
_PARSING = threading.Lock()

Rng = np.random.Generator
Check = Callable[[Answer], bool]

# What `upload` puts before anything else and nobody replaces.
WEIGHT_NAME = "soak/weight"
WEIGHT: Array = (np.arange(64 * 32, dtype=np.float32) % 17 - 8).reshape(64, 32)
ITEMS_NAME = "soak/items"
ITEMS: Array = (np.arange(300 * 24, dtype=np.float32) % 7 - 3).reshape(300, 24)
# The weight once more, as shared memory.
REGION_NAME = "soak-region"
PROGRAM_NAME = "soak-best"
PROGRAM: Mapping[str, object] = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, len(WEIGHT)]}},
    "steps": [
        {"op": "matmul", "inputs": {"a": "x", "b": f"@{WEIGHT_NAME}"}, "options": {"activation": "relu"}, "as": "h"},
        {"op": "topk", "inputs": {"x": "h"}, "options": {"k": 3}, "as": ["values", "indices"]},
    ],
    "outputs": ["values", "indices"],
}
FORMS = ("safetensors", "npz", "json")
SMALL, LARGE = (1, 64), (256, 512)


@dataclass(frozen=True)
class Call:
    """One request and what its answer must be.

    Attributes:
        name: Of the entry that made it.
        data: Bytes of the request.
        check: Whether an answer of `status` is right.
        status: Status of the answer.
        or_statuses: Other statuses that are right, whatever the body.
    """

    name: str
    data: bytes
    check: Check
    status: int = 200
    or_statuses: frozenset[int] = frozenset()

    @property
    def body_at(self) -> int:
        """Where the body begins in `data`."""
        return self.data.index(b"\r\n\r\n") + 4


def call(
    name: str, method: str, target: str, body: bytes, headers: Mapping[str, str], check: Check, status: int = 200
) -> Call:
    """A call with its length."""
    return Call(name, head(method, target, content_length=str(len(body)), **headers) + body, check, status)


def keyed(data: bytes, key: str) -> bytes:
    """A request with an API key as its first header; without a key as it is."""
    line, _, rest = data.partition(b"\r\n")
    return b"%s\r\nauthorization: Bearer %s\r\n%s" % (line, key.encode(), rest) if key else data


def integers(rng: Rng, shape: Sequence[int], dtype: str = "float32") -> Array:
    """Small integers."""
    numbers: Array = rng.integers(-8, 9, tuple(shape)).astype(dtype)
    return numbers


def equals(expected: Array, rtol: float = 0.0) -> Check:
    """Whether the tensor `out` of an answer is this one."""

    def check(answer: Answer) -> bool:
        with _PARSING:
            out = decode(answer.headers["content-type"], answer.body)
        return out.shape == expected.shape and bool(np.allclose(out, expected, rtol=rtol, atol=rtol))

    return check


def equals_all(expected: Mapping[str, Array]) -> Check:
    """Whether the tensors of an answer are these."""

    def check(answer: Answer) -> bool:
        found = from_safetensors(answer.body)
        return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)

    return check


def best(scores: Array, k: int, *, largest: bool = True) -> dict[str, Array]:
    """The k best of each row; the smaller index wins among equals."""
    indices = np.argsort(-scores if largest else scores, axis=-1, kind="stable")[..., :k]
    return {"values": np.take_along_axis(scores, indices, -1), "indices": indices}


def _size(rng: Rng) -> int:
    """Mostly small, now and then large."""
    low, high = LARGE if rng.random() < 0.05 else SMALL
    return int(rng.integers(low, high))


def _matmul(rng: Rng) -> Call:
    m, k, n = _size(rng), _size(rng), _size(rng)
    a, b = integers(rng, (m, k)), integers(rng, (k, n))
    body, headers = encode(str(rng.choice(FORMS[:2])), {"a": a, "b": b})
    return call("matmul", "POST", "/v1/matmul", body, headers, equals(a @ b))


def _matmul_json(rng: Rng) -> Call:
    a, b = integers(rng, (3, 4)), integers(rng, (4, 2))
    body, headers = encode("json", {"a": a, "b": b})
    return call("matmul as JSON", "POST", "/v1/matmul?activation=relu", body, headers, equals(np.maximum(a @ b, 0)))


def _matmul_resident(rng: Rng) -> Call:
    a = integers(rng, (_size(rng), len(WEIGHT)))
    body, headers = encode("safetensors", {"a": a})
    return call("matmul by a resident", "POST", f"/v1/matmul?b=@{WEIGHT_NAME}", body, headers, equals(a @ WEIGHT))


def _softmax(rng: Rng) -> Call:
    x = integers(rng, (_size(rng), _size(rng)))
    powers = np.exp(x - x.max(1, keepdims=True))
    body, headers = encode("npy", {"x": x})
    return call("softmax", "POST", "/v1/softmax", body, headers, equals(powers / powers.sum(1, keepdims=True), 1e-4))


def _add(rng: Rng) -> Call:
    shape = (_size(rng), _size(rng))
    dtype = str(rng.choice(["int32", "int64", "float64"]))
    a, b = integers(rng, shape, dtype), integers(rng, shape[1:], dtype)
    body, headers = encode(str(rng.choice(FORMS)), {"a": a, "b": b})
    return call("add", "POST", "/v1/add?alpha=3", body, headers, equals(a + 3 * b))


def _add_large(rng: Rng) -> Call:
    a = np.full((1024, 1024), int(rng.integers(1000)), np.float32)
    body, headers = encode("safetensors", {"a": a, "b": np.ones(1024, np.float32)})
    return call("add of 4 MiB", "POST", "/v1/add", body, headers, equals(a + 1))


def _infer(rng: Rng) -> Call:
    a, b = integers(rng, (2, _size(rng), 8)), integers(rng, (8, 5))
    body, headers = to_binary({"a": a, "b": b}, parameters={"binary_data_output": True})
    return call("infer", "POST", "/v2/models/matmul/infer", body, headers, _infers(a @ b))


def _infers(expected: Array) -> Check:
    """Whether the only output of an answer of the protocol is this."""

    def check(answer: Answer) -> bool:
        _, out = from_answer(answer.body, answer.headers.get(LENGTH.lower()))
        return bool(np.array_equal(out, expected))

    return check


def _infer_shared(rng: Rng) -> Call:
    a = integers(rng, (_size(rng), len(WEIGHT)))
    region = {"shared_memory_region": REGION_NAME, "shared_memory_byte_size": WEIGHT.nbytes}
    b = {"name": "b", "datatype": "FP32", "shape": list(WEIGHT.shape), "parameters": region}
    body = json.dumps({"inputs": [text_input("a", a), b]}).encode()
    return call("infer by shared memory", "POST", "/v2/models/matmul/infer", body, {}, _infers(a @ WEIGHT))


def _search(rng: Rng) -> Call:
    a, k = integers(rng, (int(rng.integers(1, 9)), ITEMS.shape[1])), int(rng.integers(1, 40))
    metric = str(rng.choice(["dot", "l2"]))
    squares = ((a[:, None, :] - ITEMS) ** 2).sum(2)
    body, headers = encode("safetensors", {"a": a})
    target = f"/v1/search?b=@{ITEMS_NAME}&k={k}&metric={metric}"
    expected = best(a @ ITEMS.T, k) if metric == "dot" else best(squares, k, largest=False)
    return call("search", "POST", target, body, headers, equals_all(expected))


def _topk(rng: Rng) -> Call:
    x = integers(rng, (_size(rng), _size(rng)))
    k, largest = int(rng.integers(1, min(20, x.shape[1]) + 1)), bool(rng.random() < 0.5)
    body, headers = encode("safetensors", {"x": x})
    target = f"/v1/topk?k={k}&largest={str(largest).lower()}"
    return call("topk", "POST", target, body, headers, equals_all(best(x, k, largest=largest)))


_REDUCTIONS: Mapping[str, Callable[[Array, int], Array]] = {
    "sum": lambda x, axis: x.sum(axis),
    "max": lambda x, axis: x.max(axis),
    "argmin": lambda x, axis: x.argmin(axis),
}


def _reduce(rng: Rng) -> Call:
    x, axis = integers(rng, (_size(rng), _size(rng))), int(rng.integers(2))
    kind = str(rng.choice(list(_REDUCTIONS)))
    body, headers = encode(str(rng.choice(FORMS[:2])), {"x": x})
    target = f"/v1/reduce?kind={kind}&axis={axis}"
    return call("reduce", "POST", target, body, headers, equals(_REDUCTIONS[kind](x, axis)))


def _normalize(rng: Rng) -> Call:
    x = integers(rng, (_size(rng), _size(rng))) + np.float32(0.5)
    body, headers = encode("npy", {"x": x})
    expected = x / np.sqrt((x**2).mean(1, keepdims=True))
    return call("normalize", "POST", "/v1/normalize?kind=rms", body, headers, equals(expected, 1e-4))


def _pointwise(rng: Rng) -> Call:
    x = integers(rng, (_size(rng), _size(rng)))
    y = integers(rng, x.shape[1:])
    body, headers = encode(str(rng.choice(FORMS)), {"x": x, "y": y})
    return call("pointwise", "POST", "/v1/pointwise?fn=mul&scale=2&shift=1", body, headers, equals(2 * x * y + 1))


def _program(rng: Rng) -> Call:
    x = integers(rng, (int(rng.integers(1, 40)), len(WEIGHT)))
    body, headers = encode("safetensors", {"x": x})
    expected = best(np.maximum(x @ WEIGHT, 0), 3)
    return call("program", "POST", f"/v1/programs/{PROGRAM_NAME}", body, headers, equals_all(expected))


def _run(rng: Rng) -> Call:
    x = integers(rng, (int(rng.integers(1, 5)), len(WEIGHT)))
    body = json.dumps({"program": PROGRAM, "x": x.tolist()}).encode()
    headers = {"content-type": TYPES["json"], "accept": TYPES["safetensors"]}
    return call("run", "POST", "/v1/run", body, headers, equals_all(best(np.maximum(x @ WEIGHT, 0), 3)))


def _refused(rng: Rng) -> Call:
    a, b = integers(rng, (2, 3)), integers(rng, (4, 5))
    body, headers = encode("safetensors", {"a": a, "b": b})
    return call("wrong shapes", "POST", "/v1/matmul", body, headers, lambda answer: b"inner" in answer.body, 400)


def _missing(rng: Rng) -> Call:
    path = f"/v1/softmax?x=@soak/none-{rng.integers(10**6)}"
    return call("no such resident", "POST", path, b"", {}, lambda answer: b"soak/none" in answer.body, 404)


def _pages(rng: Rng) -> Call:
    path = str(rng.choice(["/metrics", "/v1/tensors", "/v2", "/v2/models/matmul/config", "/v2/models/stats", "/"]))
    return call("pages", "GET", path, b"", {}, lambda answer: len(answer.body) > 0)


def _health(_rng: Rng) -> Call:
    return call("health", "GET", "/healthz", b"", {}, lambda answer: answer.json() == {"live": True})


Maker = Callable[[Rng], Call]
# How often each is sent, relative to the others.
CALLS: dict[Maker, int] = {
    _matmul: 20,
    _matmul_json: 5,
    _matmul_resident: 20,
    _softmax: 15,
    _add: 15,
    _add_large: 2,
    _infer: 10,
    _infer_shared: 5,
    _search: 8,
    _topk: 5,
    _reduce: 5,
    _normalize: 5,
    _pointwise: 5,
    _program: 8,
    _run: 3,
    _refused: 3,
    _missing: 3,
    _pages: 3,
    _health: 4,
}


def draw(rng: Rng) -> Call:
    """One of the calls."""
    weights = np.array(list(CALLS.values()), dtype=np.float64)
    return list(CALLS)[int(rng.choice(len(weights), p=weights / weights.sum()))](rng)


def upload(client: httpx.Client) -> None:
    """Puts what the calls name."""
    for name, tensor in ((WEIGHT_NAME, WEIGHT), (ITEMS_NAME, ITEMS)):
        body, headers = encode("npy", {"x": tensor})
        client.put(f"/v1/tensors/{name}", content=body, headers=headers).raise_for_status()
    client.put(f"/v1/programs/{PROGRAM_NAME}", json=PROGRAM).raise_for_status()
    with shared_object(WEIGHT.tobytes()) as path:
        region = {"key": f"/{path.name}", "offset": 0, "byte_size": WEIGHT.nbytes}
        client.post(f"/v2/systemsharedmemory/region/{REGION_NAME}/register", json=region).raise_for_status()


class Residents:
    """One client's tensors on the server, and which values each may have.

    A write that was acknowledged leaves one value; one without an answer leaves two. A stored result that is not durable
    may be lost with its engine.

    Args:
        client: Number of the client; nobody else writes its names.
    """

    NUM_NAMES = 3

    def __init__(self, client: int) -> None:
        self._names = [f"soak/client-{client}/{number}" for number in range(self.NUM_NAMES)]
        self._may_be: dict[str, set[int | None]] = {name: {None} for name in self._names}
        self._may_be_lost: set[str] = set()
        self._values = itertools.count(client * 10**6 + 1)

    def write(self, rng: Rng) -> tuple[Call, Callable[[bool], None]]:
        """A write of a new value, and what to call with whether it was acknowledged: a PUT, or a result that is stored."""
        name, value = str(rng.choice(self._names)), next(self._values)
        may_be = self._may_be[name]
        kind = str(rng.choice(["put", "store", "store durable"]))

        def ended(is_done: bool) -> None:
            self._may_be[name] = {value} if is_done else may_be | {value}
            if kind == "store":
                self._may_be_lost.add(name)
            elif is_done:
                self._may_be_lost.discard(name)

        def check(answer: Answer) -> bool:
            return bool(json.loads(answer.body)["name"] == name)

        tensor = np.full((4, 4), value, np.int64)
        if kind == "put":
            body, headers = encode("npy", {"x": tensor})
            write = call(kind, "PUT", f"/v1/tensors/{name}", body, headers, check, 201 if None in may_be else 200)
            is_open = (None in may_be and len(may_be) > 1) or name in self._may_be_lost
            return (replace(write, or_statuses=frozenset({200, 201})) if is_open else write), ended
        body, headers = encode("safetensors", {"a": tensor - 1, "b": np.ones_like(tensor)})
        target = f"/v1/add?store=@{name}" + ("&durable=true" if kind == "store durable" else "")
        return call(kind, "POST", target, body, headers, check, 201), ended

    def read(self, rng: Rng) -> Call:
        """A GET of a name, which must have one of the values that it may have."""
        name = str(rng.choice(self._names))
        may_be = frozenset(self._may_be[name])

        def check(answer: Answer) -> bool:
            array = decode(answer.headers["content-type"], answer.body)
            (value,) = set(array.reshape(-1).tolist())
            return value in may_be

        get = call("get", "GET", f"/v1/tensors/{name}", b"", {"accept": TYPES["npy"]}, check)
        missing = {404} if None in may_be else set()
        return replace(get, or_statuses=frozenset(missing | ({410} if name in self._may_be_lost else set())))

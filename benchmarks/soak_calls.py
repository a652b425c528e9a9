"""The calls that a soak sends, each with a check of its answer. A further op or program is one entry of `CALLS`.

Products and sums are of small integers, so that their answers are exact whatever the order of the sums.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tests.support.oip_bodies import LENGTH, from_answer, to_binary
from tests.support.raw_http import Answer, head
from tests.support.tensor_bodies import TYPES, Array, decode, encode

# NumPy reads the header of npy by `ast`, which fails between threads in some releases of Python 3.11.
_PARSING = threading.Lock()

Rng = np.random.Generator
Check = Callable[[Answer], bool]

# A weight that `Residents` uploads before anything else and nobody replaces.
WEIGHT_NAME = "soak/weight"
WEIGHT: Array = (np.arange(64 * 32, dtype=np.float32) % 17 - 8).reshape(64, 32)
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
        or_status: Another status that is right, whatever the body; 0 for none.
    """

    name: str
    data: bytes
    check: Check
    status: int = 200
    or_status: int = 0

    @property
    def body_at(self) -> int:
        """Where the body begins in `data`."""
        return self.data.index(b"\r\n\r\n") + 4


def call(
    name: str, method: str, target: str, body: bytes, headers: Mapping[str, str], check: Check, status: int = 200
) -> Call:
    """A call with its length."""
    return Call(name, head(method, target, content_length=str(len(body)), **headers) + body, check, status)


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

    def check(answer: Answer) -> bool:
        _, out = from_answer(answer.body, answer.headers.get(LENGTH.lower()))
        return bool(np.array_equal(out, a @ b))

    return call("infer", "POST", "/v2/models/matmul/infer", body, headers, check)


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
    _refused: 3,
    _missing: 3,
    _pages: 3,
    _health: 4,
}


def draw(rng: Rng) -> Call:
    """One of the calls."""
    weights = np.array(list(CALLS.values()), dtype=np.float64)
    return list(CALLS)[int(rng.choice(len(weights), p=weights / weights.sum()))](rng)


class Residents:
    """One client's tensors on the server, and which values each may have.

    A write that was acknowledged leaves one value; one without an answer leaves two.

    Args:
        client: Number of the client; nobody else writes its names.
    """

    NUM_NAMES = 3

    def __init__(self, client: int) -> None:
        self._names = [f"soak/client-{client}/{number}" for number in range(self.NUM_NAMES)]
        self._may_be: dict[str, set[int | None]] = {name: {None} for name in self._names}
        self._values = itertools.count(client * 10**6 + 1)

    def write(self, rng: Rng) -> tuple[Call, Callable[[bool], None]]:
        """A PUT of a new value, and what to call with whether it was acknowledged."""
        name, value = str(rng.choice(self._names)), next(self._values)
        body, headers = encode("npy", {"x": np.full((4, 4), value, np.int64)})
        may_be = self._may_be[name]

        def ended(is_done: bool) -> None:
            self._may_be[name] = {value} if is_done else may_be | {value}

        def check(answer: Answer) -> bool:
            return bool(json.loads(answer.body)["name"] == name)

        put = call("put", "PUT", f"/v1/tensors/{name}", body, headers, check, 201 if None in may_be else 200)
        # A value that may be there may be replaced.
        return (replace(put, or_status=200) if None in may_be and len(may_be) > 1 else put), ended

    def read(self, rng: Rng) -> Call:
        """A GET of a name, which must have one of the values that it may have."""
        name = str(rng.choice(self._names))
        may_be = frozenset(self._may_be[name])

        def check(answer: Answer) -> bool:
            array = decode(answer.headers["content-type"], answer.body)
            (value,) = set(array.reshape(-1).tolist())
            return value in may_be

        get = call("get", "GET", f"/v1/tensors/{name}", b"", {"accept": TYPES["npy"]}, check)
        return replace(get, or_status=404) if None in may_be else get

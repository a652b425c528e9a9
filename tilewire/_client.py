"""The blocking client. Owns one connection pool, the retries and their waits; `_wire` knows what is sent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import count
from types import TracebackType
from typing import Any, Self, Unpack, overload

import httpx
import numpy.typing as npt

from tilewire import _wire
from tilewire._arrays import Array
from tilewire._errors import ConnectionFailed, Unavailable
from tilewire._types import AddOptions, Answer, MatmulOptions, Operand, SoftmaxOptions, TensorInfo

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_TIMEOUT_S = 60.0
POLL_S = 0.1


class Client:
    """Calls a Tilewire server and waits for its answers. Safe to share between threads.

    Args:
        base_url: Of the server.
        api_key: Sent as `Authorization: Bearer …`.
        timeout: Seconds without progress on the connection, or httpx's own value object.
        max_retries: How often a request that the server refused as busy or unavailable is sent again, after the wait
            that it asked for.
        headers: Sent with every request.
        transport: Replaces the network, as in httpx.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._max_retries = max_retries
        shared = _wire.client_headers(api_key, headers)
        self._http = httpx.Client(base_url=base_url, timeout=timeout, headers=shared, transport=transport)
        http = self._http
        self._url_of = _wire.Urls(lambda call: http.build_request("GET", call.path, params=call.query).url)

    @overload
    def matmul(self, a: Operand, b: Operand, *, store: str, **options: Unpack[MatmulOptions]) -> TensorInfo: ...
    @overload
    def matmul(self, a: Operand, b: Operand, *, store: None = None, **options: Unpack[MatmulOptions]) -> Array: ...
    def matmul(
        self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[MatmulOptions]
    ) -> Array | TensorInfo:
        """Computes activation(a @ b + bias).

        Args:
            a: (…, M, K), or the name of a resident tensor, "@…".
            b: (…, K, N), likewise; leading dimensions broadcast.
            store: Name under which the result stays on the server; then its description is returned.
            **options: See `MatmulOptions`.

        Returns:
            (…, M, N) of `out_dtype`, by default that of the inputs (int8: int32, float8: bfloat16).

        Raises:
            TilewireError: The class says what is wrong.
        """
        return self.run("matmul", {"a": a, "b": b}, store=store, **options).result

    @overload
    def softmax(self, x: Operand, *, store: str, **options: Unpack[SoftmaxOptions]) -> TensorInfo: ...
    @overload
    def softmax(self, x: Operand, *, store: None = None, **options: Unpack[SoftmaxOptions]) -> Array: ...
    def softmax(self, x: Operand, *, store: str | None = None, **options: Unpack[SoftmaxOptions]) -> Array | TensorInfo:
        """Computes softmax or log-softmax along one axis.

        Args:
            x: Of rank 1 or more, or the name of a resident tensor, "@…".
            store: Name under which the result stays on the server; then its description is returned.
            **options: See `SoftmaxOptions`.

        Returns:
            An array of the shape of `x`.

        Raises:
            TilewireError: The class says what is wrong.
        """
        return self.run("softmax", {"x": x}, store=store, **options).result

    @overload
    def add(self, a: Operand, b: Operand, *, store: str, **options: Unpack[AddOptions]) -> TensorInfo: ...
    @overload
    def add(self, a: Operand, b: Operand, *, store: None = None, **options: Unpack[AddOptions]) -> Array: ...
    def add(
        self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[AddOptions]
    ) -> Array | TensorInfo:
        """Computes a + alpha·b, broadcasting as NumPy does.

        Args:
            a: An array, or the name of a resident tensor, "@…".
            b: Likewise, of the same dtype.
            store: Name under which the result stays on the server; then its description is returned.
            **options: See `AddOptions`.

        Returns:
            An array of the shape that both broadcast to.

        Raises:
            TilewireError: The class says what is wrong.
        """
        return self.run("add", {"a": a, "b": b}, store=store, **options).result

    def run(
        self, op: str, operands: Mapping[str, Operand | None], *, store: str | None = None, **options: Any
    ) -> Answer:
        """Runs an op and returns, besides the result, the server's timings and the size of the batch it ran in.

        Args:
            op: `matmul`, `softmax` or `add`.
            operands: By input name.
            store: As for the ops' own methods.
            **options: As for the ops' own methods; operands are not among them.

        Raises:
            TilewireError: The class says what is wrong.
        """
        return _wire.parse_answer(_wire.checked(self._send(_wire.op_call(op, operands, options, store))))

    def put(self, name: str, array: npt.ArrayLike) -> TensorInfo:
        """Stores an array on the server under a name, replacing what was there.

        Raises:
            QuotaExceeded: It does not fit beside the others.
        """
        return _wire.parse_put(_wire.checked(self._send(_wire.put_call(name, array))), name, array)

    def get(self, name: str) -> Array:
        """Fetches a resident tensor.

        Raises:
            NotFound: No tensor of that name.
        """
        return _wire.parse_array(_wire.checked(self._send(_wire.tensor_call("GET", name))))

    def head(self, name: str) -> TensorInfo | None:
        """Describes a resident tensor, or returns None where there is none of that name."""
        return _wire.parse_head(self._send(_wire.tensor_call("HEAD", name)), name)

    def delete(self, name: str) -> None:
        """Removes a resident tensor.

        Raises:
            NotFound: No tensor of that name.
        """
        _wire.checked(self._send(_wire.tensor_call("DELETE", name)))

    def tensors(self) -> list[TensorInfo]:
        """Lists the resident tensors."""
        return _wire.parse_list(_wire.checked(self._send(_wire.LIST)))

    def live(self) -> bool:
        """Whether a server answers."""
        return self._is_ok(_wire.LIVE)

    def ready(self) -> bool:
        """Whether the server answers and takes requests."""
        return self._is_ok(_wire.READY)

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Returns as soon as the server takes requests.

        Raises:
            Unavailable: It does not within `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() >= until:
                raise Unavailable(f"{self._http.base_url}: not ready within {timeout_s:g} s")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_ok(self, call: _wire.Call) -> bool:
        try:
            return self._exchange(call).status == 200
        except ConnectionFailed:
            return False

    def _send(self, call: _wire.Call) -> _wire.Reply:
        for attempt in count():
            reply = self._exchange(call)
            wait_s = _wire.wait_before_retry_s(reply, attempt, self._max_retries)
            if wait_s is None:
                break
            time.sleep(wait_s)
        return reply

    def _exchange(self, call: _wire.Call) -> _wire.Reply:
        content = call.chunks() if call.parts else None
        body = bytearray()
        try:
            with self._http.stream(call.method, self._url_of(call), headers=call.headers, content=content) as response:
                for chunk in response.iter_bytes():
                    body += chunk
        except httpx.TransportError as error:
            raise ConnectionFailed(_wire.unreachable(self._http.base_url, error)) from error
        return _wire.Reply(response.status_code, response.headers, body)

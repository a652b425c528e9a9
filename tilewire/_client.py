"""The blocking client, and its handles of tensors and programs. Owns the retries' waits; `_requests` builds what is sent.

`_async_client.py` is written from this file by `python -m tests.support.async_client`.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from tilewire import _requests
from tilewire._arrays.files import Destination, Source
from tilewire._arrays.host import Array
from tilewire._errors import ConnectionFailed, Unavailable
from tilewire._names import program_name, tensor_name
from tilewire._programs.program import InputSpec, Program
from tilewire._programs.trace import record
from tilewire._transport import wire
from tilewire._transport.progress import ProgressBar
from tilewire._transport.retry import Retries
from tilewire._transport.sockets import SocketTransport
from tilewire._transport.wire import DEFAULT_TIMEOUT_S, DEFAULT_URL, POLL_S, READY_TIMEOUT_S, has_proxy
from tilewire._types import (
    AddOptions,
    Answer,
    CallOptions,
    HostOperand,
    MatmulOptions,
    NormalizeKind,
    NormalizeOptions,
    Operand,
    Placement,
    PointwiseFunction,
    PointwiseOptions,
    ReduceKind,
    ReduceOptions,
    Resident,
    SearchOptions,
    SoftmaxOptions,
    TensorInfo,
    TopK,
    TopKOptions,
)

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")


class Client:
    """Calls a Tilewire server and waits for its answers. Safe to share between threads.

    Plain HTTP goes over connections of the client's own; TLS, proxies and `transport=` go through httpx.

    Args:
        base_url: Address of the server, `http://…` or `https://…`.
        api_key: Sent as `Authorization: Bearer …`.
        timeout: Seconds without progress on the connection, or httpx's own value object.
        max_retries: Number of times that a request is sent again which the server refused as busy or unavailable, or
            whose connection was refused or reset. Waits double, or are as long as the server says.
        headers: Sent with every request.
        cast: Dtype for arrays of a dtype that an op does not take, as "float32" for float64 arrays. None makes them an
            error before anything is sent.
        transport: Replaces the network, as in httpx.

    Raises:
        ValueError: An address without a scheme.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        timeout: float | httpx.Timeout | None = DEFAULT_TIMEOUT_S,
        max_retries: int = 2,
        headers: Mapping[str, str] | None = None,
        cast: Any = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._base_url = wire.checked_url(base_url)
        self._max_retries = max_retries
        self._rules = _requests.Rules.of(cast)
        shared = wire.client_headers(api_key, headers)
        self._transport = make_transport(self._base_url, timeout, shared, transport)
        self.tensors = Tensors(self)
        self.programs = Programs(self)

    # ── ops ───────────────────────────────────────────────────────────────────────────────────────

    @overload
    def matmul(self, a: Operand, b: Operand, *, store: str, **options: Unpack[MatmulOptions]) -> Tensor: ...
    @overload
    def matmul(
        self, a: HostOperand, b: HostOperand, *, store: None = None, **options: Unpack[MatmulOptions]
    ) -> Array: ...
    @overload
    def matmul(self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[MatmulOptions]) -> Any: ...
    def matmul(self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[MatmulOptions]) -> Any:
        """Computes activation(a @ b + bias).

        Args:
            a: (…, M, K) or (K,): an array, a list, a handle, or the name of a resident tensor, "@…".
            b: (…, K, N) or (K,), likewise; leading dimensions broadcast, vectors follow `np.matmul`.
            store: Name under which the result stays on the server; then its handle is returned.
            **options: See `MatmulOptions`.

        Returns:
            (…, M, N) of `out_dtype`, by default that of the inputs (int8: int32, float8: bfloat16). From torch, JAX or
            CuPy arrays comes an array of the same library, on the same device.

        Raises:
            TypeError: A dtype that the op does not take, as float64; the message says what to type.
            TilewireError: The class says what is wrong.
        """
        return self.run("matmul", {"a": a, "b": b}, store=store, **options).result

    @overload
    def softmax(self, x: Operand, *, store: str, **options: Unpack[SoftmaxOptions]) -> Tensor: ...
    @overload
    def softmax(self, x: HostOperand, *, store: None = None, **options: Unpack[SoftmaxOptions]) -> Array: ...
    @overload
    def softmax(self, x: Operand, *, store: str | None = None, **options: Unpack[SoftmaxOptions]) -> Any: ...
    def softmax(self, x: Operand, *, store: str | None = None, **options: Unpack[SoftmaxOptions]) -> Any:
        """Computes softmax or log-softmax along one axis.

        Args:
            x: Rank 1 or more; operands are as for `matmul`.
            store: As for `matmul`.
            **options: See `SoftmaxOptions`.

        Returns:
            An array of the shape of `x`.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        return self.run("softmax", {"x": x}, store=store, **options).result

    @overload
    def add(self, a: Operand, b: Operand, *, store: str, **options: Unpack[AddOptions]) -> Tensor: ...
    @overload
    def add(self, a: HostOperand, b: HostOperand, *, store: None = None, **options: Unpack[AddOptions]) -> Array: ...
    @overload
    def add(self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[AddOptions]) -> Any: ...
    def add(self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[AddOptions]) -> Any:
        """Computes a + alpha·b, broadcasting as NumPy does.

        Args:
            a: An operand as for `matmul`; numbers, too.
            b: Likewise.
            store: As for `matmul`.
            **options: See `AddOptions`.

        Returns:
            An array of the shape that both broadcast to.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        return self.run("add", {"a": a, "b": b}, store=store, **options).result

    def search(self, queries: Operand, items: Operand, k: int = 10, **options: Unpack[SearchOptions]) -> TopK:
        """Finds the k best items of each query, exactly.

        Args:
            queries: (…, M, K).
            items: (N, K), an item in each row; usually resident.
            k: Number of items to find, 1 to 1,024.
            **options: See `SearchOptions`.

        Returns:
            `values` (…, M, k), float32, best first, and `indices` (…, M, k), int64.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        result: TopK = self.run("search", {"a": queries, "b": items}, k=k, **options).result
        return result

    def topk(self, x: Operand, k: int, **options: Unpack[TopKOptions]) -> TopK:
        """Finds the k largest or smallest elements along one axis.

        Args:
            x: Rank 1 or more.
            k: Number of elements to find.
            **options: See `TopKOptions`.

        Returns:
            `values`, dtype of `x`, and `indices`, int64; the axis has length k.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        result: TopK = self.run("topk", {"x": x}, k=k, **options).result
        return result

    @overload
    def reduce(self, x: Operand, kind: ReduceKind, *, store: str, **options: Unpack[ReduceOptions]) -> Tensor: ...
    @overload
    def reduce(
        self, x: HostOperand, kind: ReduceKind, *, store: None = None, **options: Unpack[ReduceOptions]
    ) -> Array: ...
    @overload
    def reduce(
        self, x: Operand, kind: ReduceKind, *, store: str | None = None, **options: Unpack[ReduceOptions]
    ) -> Any: ...
    def reduce(
        self, x: Operand, kind: ReduceKind, *, store: str | None = None, **options: Unpack[ReduceOptions]
    ) -> Any:
        """Reduces one axis, or all of them, to a number.

        Args:
            x: Rank 1 or more.
            kind: Sum, mean, largest, smallest, their indices, logsumexp or 2-norm.
            store: As for `matmul`.
            **options: See `ReduceOptions`.

        Returns:
            An array without the axis; `argmax` and `argmin` are int64.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        # As in NumPy, None is every axis.
        axis = {"axis": options["axis"] if options["axis"] is not None else "all"} if "axis" in options else {}
        rest = {name: value for name, value in options.items() if name != "axis"}
        return self.run("reduce", {"x": x}, store=store, kind=kind, **axis, **rest).result

    @overload
    def normalize(
        self, x: Operand, kind: NormalizeKind, *, store: str, **options: Unpack[NormalizeOptions]
    ) -> Tensor: ...
    @overload
    def normalize(
        self, x: HostOperand, kind: NormalizeKind, *, store: None = None, **options: Unpack[NormalizeOptions]
    ) -> Array: ...
    @overload
    def normalize(
        self, x: Operand, kind: NormalizeKind, *, store: str | None = None, **options: Unpack[NormalizeOptions]
    ) -> Any: ...
    def normalize(
        self, x: Operand, kind: NormalizeKind, *, store: str | None = None, **options: Unpack[NormalizeOptions]
    ) -> Any:
        """Normalizes one axis: layer norm, RMS norm or to the 2-norm 1.

        Args:
            x: (…, N).
            kind: `layer`, `rms` or `l2`.
            store: As for `matmul`.
            **options: See `NormalizeOptions`.

        Returns:
            An array of the shape of `x`.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        return self.run("normalize", {"x": x}, store=store, kind=kind, **options).result

    @overload
    def pointwise(
        self, fn: PointwiseFunction, x: Operand, y: Operand = None, *, store: str, **options: Unpack[PointwiseOptions]
    ) -> Tensor: ...
    @overload
    def pointwise(
        self,
        fn: PointwiseFunction,
        x: HostOperand,
        y: HostOperand | None = None,
        *,
        store: None = None,
        **options: Unpack[PointwiseOptions],
    ) -> Array: ...
    @overload
    def pointwise(
        self,
        fn: PointwiseFunction,
        x: Operand,
        y: Operand = None,
        *,
        store: str | None = None,
        **options: Unpack[PointwiseOptions],
    ) -> Any: ...
    def pointwise(
        self,
        fn: PointwiseFunction,
        x: Operand,
        y: Operand = None,
        *,
        store: str | None = None,
        **options: Unpack[PointwiseOptions],
    ) -> Any:
        """Computes fn(x) or fn(x, y), element by element, times `scale` plus `shift`.

        Args:
            fn: `mul`, `sub`, `div`, `maximum` or `minimum` with `y`; the others without.
            x: An operand as for `matmul`.
            y: Likewise, broadcasting.
            store: As for `matmul`.
            **options: See `PointwiseOptions`.

        Returns:
            An array of the shape that both broadcast to.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        return self.run("pointwise", {"x": x, "y": y}, store=store, fn=fn, **options).result

    def run(self, op: str, operands: Mapping[str, Operand], *, store: str | None = None, **options: Any) -> Answer:
        """Runs an op and returns, besides the result, the server's timings and the size of the batch it ran in.

        Args:
            op: Name of the op.
            operands: Operands by input name; None for those that are not given.
            store: As for `matmul`.
            **options: Options of the op, as for its own method; `bias` and the like among them.

        Raises:
            TypeError: A dtype that the op does not take.
            TilewireError: The class says what is wrong.
        """
        return self._do(self._rules.op(op, operands, options, store))

    # ── programs ──────────────────────────────────────────────────────────────────────────────────

    def program(self, name: str, program: Program | Mapping[str, Any]) -> KeptProgram:
        """Keeps a program on the server under a name, replacing what was there, and returns its handle.

        Args:
            name: 1 to 255 of A-Z a-z 0-9 . _ -, and no op's.
            program: A `Program`, or the contract's JSON as a dict.

        Raises:
            ValueError: Not a program.
            BadRequest: A step that cannot be right; the detail has its number.
        """
        checked = program if isinstance(program, Program) else Program.from_dict(program)
        self._do(_requests.keep_program(name, checked))
        return KeptProgram(self, name, checked)

    def run_program(
        self, program: Program | Mapping[str, Any], inputs: Mapping[str, Operand], **options: Unpack[CallOptions]
    ) -> Answer:
        """Runs a program without keeping it.

        Args:
            program: A `Program`, or the contract's JSON as a dict.
            inputs: Operands by input name.
            **options: See `CallOptions`.
        """
        checked = program if isinstance(program, Program) else Program.from_dict(program)
        return self._do(_requests.run_program(checked, inputs, options))

    def trace(
        self, function: Callable[..., Any], /, *, name: str | None = None, **inputs: InputSpec | tuple[Any, Any]
    ) -> KeptProgram:
        """Records NumPy-like code as a program and keeps it on the server.

        The function is called once, with stand-ins for arrays: they have `@ + - * /`, the methods of `Traced`, and go
        through NumPy's functions. Arrays that the code refers to are uploaded as `name/c0`, `name/c1`, …

        Args:
            function: Called with each input by name; returns one traced value, several, or a dict of them.
            name: Name of the program; the function's by default.
            **inputs: Dtype and shape of each argument, as `("float32", (-1, 768))`; -1 for any size.

        Raises:
            TypeError: The code does something that no op computes.
            BadRequest: The program cannot be right; the detail has the step's number.
        """
        name = name or function.__name__
        recorded = record(function, inputs, name)
        for constant, array in recorded.constants.items():
            self.put(constant, array)
        return self.program(name, recorded.program)

    # ── resident tensors ──────────────────────────────────────────────────────────────────────────

    def put(
        self, name: str, array: Operand, *, placement: Placement | None = None, progress: bool | None = None
    ) -> Tensor:
        """Stores an array on the server under a name, replacing what was there, and returns its handle.

        Args:
            name: Name, with or without the `@`.
            array: Anything that `np.asarray` takes, `np.memmap` too, or an array of torch, JAX or CuPy.
            placement: Devices that shall hold it, on a server with several: `replicate` for all, `single` for one; by
                default by its size.
            progress: Whether to draw a progress bar; None draws one on a terminal when the transfer is long.

        Raises:
            QuotaExceeded: It does not fit beside the others.
        """
        with ProgressBar(name, progress) as bar:
            tensor: Tensor = self._do(self._rules.put(name, array, bar, placement))
        return tensor

    def put_file(
        self, path: str | os.PathLike[str], name: str | None = None, *, progress: bool | None = None
    ) -> list[Tensor]:
        """Stores the tensors of a file; npy and safetensors files are sent as they lie, without a copy in memory.

        Args:
            path: Ends in .npy, .npz or .safetensors.
            name: Name of the one tensor, or the prefix of several; the file's name without its ending by default.
            progress: As for `put`.

        Raises:
            OSError: The file cannot be read.
            ValueError: Another format.
            QuotaExceeded: It does not fit beside the others.
        """
        source = Source(Path(path))
        arrays = _requests.sources(name or source.path.stem, source)
        return [self.put(full, array, progress=progress) for full, array in arrays.items()]

    def get(self, name: str, *, progress: bool | None = None) -> Array:
        """Fetches a resident tensor.

        Raises:
            NotFound: No tensor of that name.
        """
        with ProgressBar(name, progress) as bar:
            array: Array = self._do(_requests.get(name, progress=bar))
        return array

    def get_file(self, name: str, path: str | os.PathLike[str], *, progress: bool | None = None) -> Path:
        """Fetches a resident tensor into a file, without a copy in memory. The file is replaced whole or not at all.

        Args:
            name: Name, with or without the `@`.
            path: Ends in .npy or .safetensors.
            progress: As for `put`.

        Raises:
            NotFound: No tensor of that name.
            OSError: The file cannot be written.
            ValueError: Another format.
        """
        into = Destination(Path(path))
        try:
            with ProgressBar(name, progress) as bar:
                written: Path = self._do(_requests.get(name, into, bar))
        finally:
            into.discard()
        return written

    def head(self, name: str) -> TensorInfo | None:
        """Describes a resident tensor, or returns None where there is none of that name."""
        return self._do(_requests.head(name))

    def delete(self, name: str) -> None:
        """Removes a resident tensor.

        Raises:
            NotFound: No tensor of that name.
        """
        self._do(_requests.delete(name))

    # ── the server ────────────────────────────────────────────────────────────────────────────────

    def live(self) -> bool:
        """Whether a server answers."""
        return self._is_ok("live")

    def ready(self) -> bool:
        """Whether the server answers and takes requests."""
        return self._is_ok("ready")

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Returns as soon as the server takes requests.

        Raises:
            Unavailable: It does not within `timeout_s` seconds.
        """
        until = time.monotonic() + timeout_s
        while not self.ready():
            if time.monotonic() >= until:
                raise Unavailable(f"{self._base_url}: not ready within {timeout_s:g} s")
            time.sleep(POLL_S)

    def exchange(self, method: str, path: str) -> wire.Reply:
        """Sends a request without a body to any path, and returns the answer whatever its status.

        Raises:
            ConnectionFailed: No answer.
        """
        return self._send(wire.Call(method, path))

    def close(self) -> None:
        """Closes the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._base_url!r})"

    def _handle(self, info: TensorInfo) -> Tensor:
        return Tensor(self, info.name, info)

    def _is_ok(self, kind: Literal["live", "ready"]) -> bool:
        request = _requests.is_ok(kind)
        try:
            return request.parse(self._transport.exchange(request.call), self._handle)
        except ConnectionFailed:
            return False

    def _do(self, request: _requests.Request[T]) -> T:
        return request.parse(self._send(request.call), self._handle)

    def _send(self, call: wire.Call) -> wire.Reply:
        retries = Retries(call, self._max_retries)
        while True:
            outcome: wire.Reply | ConnectionFailed
            try:
                outcome = self._transport.exchange(retries.next_call())
            except ConnectionFailed as error:
                outcome = error
            wait_s = retries.wait_s(outcome)
            if wait_s is None:
                break
            time.sleep(wait_s)
        if isinstance(outcome, ConnectionFailed):
            raise outcome
        return outcome


class Tensor(Resident):
    """A handle of a resident tensor: an operand by itself, as in `x @ w`.

    Attributes:
        name: Name without the `@`.
    """

    __slots__ = ("_client",)

    def __init__(self, client: Client, name: str, described: TensorInfo | None = None) -> None:
        super().__init__(name, described)
        self._client = client

    def describe(self) -> TensorInfo:
        """Fetches the description, which the handle then keeps.

        Raises:
            NotFound: No tensor of that name.
        """
        self._described = _requests.there(self._client.head(self.name), self.name)
        return self._described

    def fetch(self) -> Array:
        """Fetches the elements.

        Raises:
            NotFound: No tensor of that name.
        """
        return self._client.get(self.name)

    def delete(self) -> None:
        """Removes the tensor from the server.

        Raises:
            NotFound: No tensor of that name.
        """
        self._client.delete(self.name)

    # <sync>
    def _known(self) -> TensorInfo:
        return self.describe() if self._described is None else self._described

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.fetch() if dtype is None else self.fetch().astype(dtype)

    # </sync>
    def __matmul__(self, other: Operand) -> Any:
        return self._client.matmul(self, other)

    def __rmatmul__(self, other: Operand) -> Any:
        return self._client.matmul(other, self)

    def __add__(self, other: Operand) -> Any:
        return self._client.add(self, other)

    def __radd__(self, other: Operand) -> Any:
        return self._client.add(other, self)

    def __sub__(self, other: Operand) -> Any:
        return self._client.add(self, other, alpha=-1)

    def __rsub__(self, other: Operand) -> Any:
        return self._client.add(other, self, alpha=-1)

    def __mul__(self, other: Operand) -> Any:
        return self._client.pointwise("mul", self, other)

    def __rmul__(self, other: Operand) -> Any:
        return self._client.pointwise("mul", other, self)

    def __truediv__(self, other: Operand) -> Any:
        return self._client.pointwise("div", self, other)

    def __rtruediv__(self, other: Operand) -> Any:
        return self._client.pointwise("div", other, self)


class Tensors:
    """The resident tensors of a server, by name. Calling it lists them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getitem__(self, name: str) -> Tensor:
        return Tensor(self._client, tensor_name(name))

    def __call__(self) -> list[Tensor]:
        """Lists the resident tensors, described."""
        return self._client._do(_requests.tensors())

    # <sync>
    def __setitem__(self, name: str, array: Operand) -> None:
        self._client.put(name, array)

    def __delitem__(self, name: str) -> None:
        self._client.delete(name)

    def __contains__(self, name: str) -> bool:
        return self._client.head(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter([tensor.name for tensor in self()])

    def __len__(self) -> int:
        return len(self())

    # </sync>
    def __repr__(self) -> str:
        return f"<tensors of {self._client!r}>"


class KeptProgram:
    """A handle of a program on the server; calling it runs it.

    Attributes:
        name: Name of the program.
    """

    def __init__(self, client: Client, name: str, program: Program | None = None) -> None:
        self._client = client
        self.name = name
        self._program = program

    def __call__(self, **inputs: Operand) -> Any:
        """Runs the program.

        Args:
            **inputs: Operands by input name.

        Returns:
            The output, or the outputs by name where there are several (`TopK` for values and indices).
        """
        return self.run(inputs).result

    def run(self, inputs: Mapping[str, Operand], **options: Unpack[CallOptions]) -> Answer:
        """Runs the program and returns, besides the outputs, timings and the size of the batch.

        Args:
            inputs: Operands by input name.
            **options: See `CallOptions`.
        """
        return self._client._do(_requests.run_program(self.name, inputs, options, self._program))

    def describe(self) -> Program:
        """Fetches the program, which the handle then keeps.

        Raises:
            NotFound: No program of that name.
        """
        self._program = self._client._do(_requests.program(self.name))
        return self._program

    def delete(self) -> None:
        """Removes the program from the server.

        Raises:
            NotFound: No program of that name.
        """
        self._client._do(_requests.delete_program(self.name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


class Programs:
    """The programs that a server keeps, by name. Calling it lists them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getitem__(self, name: str) -> KeptProgram:
        return KeptProgram(self._client, program_name(name))

    def __call__(self) -> list[KeptProgram]:
        """Lists the programs."""
        names = self._client._do(_requests.programs())
        return [KeptProgram(self._client, name) for name in names]

    def __repr__(self) -> str:
        return f"<programs of {self._client!r}>"


def make_transport(
    base_url: str, timeout: float | httpx.Timeout | None, headers: Mapping[str, str], own: httpx.BaseTransport | None
) -> wire.Transport:
    """Returns the transport for an address: of one's own for plain HTTP, on httpx for the rest."""
    is_plain = own is None and base_url.startswith("http://") and not has_proxy(base_url)
    if is_plain and (timeout is None or isinstance(timeout, int | float)):
        return SocketTransport(base_url, timeout, headers)
    # By name: loading httpx takes longer than all the rest of the client.
    made: wire.Transport = importlib.import_module("tilewire._transport.over_httpx").HttpxTransport(
        base_url, timeout, headers, own
    )
    return made

"""Calls of ops and of resident tensors, and the handles of tensors: the part of the blocking client that sends nothing itself.

`async_tensors.py` is written from this file by `python -m tests.support.async_client`.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from tilewire._arrays.files import Destination, Source
from tilewire._arrays.host import Array
from tilewire._clients import requests
from tilewire._clients.by_name import ByName
from tilewire._clients.requests import Request, Rules, with_one_axis
from tilewire._names import tensor_name
from tilewire._options import (
    AddOptions,
    MatmulOptions,
    NormalizeKind,
    NormalizeOptions,
    PointwiseFunction,
    PointwiseOptions,
    ReduceKind,
    ReduceOptions,
    SearchOptions,
    SoftmaxOptions,
    TopKOptions,
)
from tilewire._transport import wire
from tilewire._transport.progress import ProgressBar
from tilewire._types import Answer, HostOperand, IfMatch, Operand, Placement, Resident, TensorInfo, TopK

T = TypeVar("T")


class TensorCalls(abc.ABC):
    """Calls of ops and of resident tensors.

    Args:
        rules: Choices that hold for each request.

    Attributes:
        tensors: The resident tensors, by name.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.tensors = Tensors(self)

    @abc.abstractmethod
    def _send(self, call: wire.Call) -> wire.Reply:
        """Sends a call, again where that may help, and returns the last reply."""

    def _offload(self, work: Callable[[], T], _find: Callable[[], Sequence[Any]]) -> T:
        """Returns the result of work that converts or copies the arrays that `_find` finds."""
        return work()

    def _do(self, request: Request[T]) -> T:
        reply = self._send(request.call)
        return self._offload(lambda: request.parse(reply, self._handle), lambda: request.copied_from(reply))

    def _do_with(self, find: Callable[[], Sequence[Any]], make: Callable[[], Request[T]]) -> T:
        """Does a request that is made of arrays which may have to be converted or copied."""
        return self._do(self._offload(make, find))

    def _handle(self, info: TensorInfo) -> Tensor:
        return Tensor(self, info.name, info)

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
            TypeError: A dtype that the op does not take, or None as the axis.
            TilewireError: The class says what is wrong.
        """
        return self.run("softmax", {"x": x}, store=store, **with_one_axis(options)).result

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

    @overload
    def search(
        self, queries: HostOperand, items: HostOperand, k: int = 10, **options: Unpack[SearchOptions]
    ) -> TopK[Array]: ...
    @overload
    def search(self, queries: Operand, items: Operand, k: int = 10, **options: Unpack[SearchOptions]) -> TopK[Any]: ...
    def search(self, queries: Operand, items: Operand, k: int = 10, **options: Unpack[SearchOptions]) -> TopK[Any]:
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
        result: TopK[Any] = self.run("search", {"a": queries, "b": items}, k=k, **options).result
        return result

    @overload
    def topk(self, x: HostOperand, k: int, **options: Unpack[TopKOptions]) -> TopK[Array]: ...
    @overload
    def topk(self, x: Operand, k: int, **options: Unpack[TopKOptions]) -> TopK[Any]: ...
    def topk(self, x: Operand, k: int, **options: Unpack[TopKOptions]) -> TopK[Any]:
        """Finds the k largest or smallest elements along one axis.

        Args:
            x: Rank 1 or more.
            k: Number of elements to find.
            **options: See `TopKOptions`.

        Returns:
            `values`, dtype of `x`, and `indices`, int64; the axis has length k.

        Raises:
            TypeError: A dtype that the op does not take, or None as the axis.
            TilewireError: The class says what is wrong.
        """
        result: TopK[Any] = self.run("topk", {"x": x}, k=k, **with_one_axis(options)).result
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
        return self._do_with(
            lambda: self._rules.copied(operands, options), lambda: self._rules.op(op, operands, options, store)
        )

    # ── resident tensors ──────────────────────────────────────────────────────────────────────────

    def put(
        self,
        name: str,
        array: Operand,
        *,
        placement: Placement | None = None,
        axis: int | None = None,
        if_match: IfMatch | None = None,
        progress: bool | None = None,
    ) -> Tensor:
        """Stores an array on the server under a name, replacing what was there, and returns its handle.

        Args:
            name: Name, with or without the `@`.
            array: Anything that `np.asarray` takes, `np.memmap` too, or an array of torch, JAX or CuPy.
            placement: Devices that shall hold it, on a server with several: `replicate` for all, `single` for one,
                `shard` for all with a part each. By default its size decides.
            axis: Axis along which a sharded array is cut: -1, its columns, or -2, its rows, as the items of a search.
            if_match: Version, or several, of which the tensor that is replaced must have one: a number as
                `handle.version`, a handle, or "*" for any.
            progress: Whether to draw a progress bar; None draws one on a terminal when the transfer is long.

        Raises:
            PreconditionFailed: The tensor has no such version, or there is none. Of two changes that demand the same
                version, one is done.
            ConnectionFailed: With `if_match`, also where it is not known whether the change was done; so is `Unavailable`.
            QuotaExceeded: It does not fit beside the others.
        """
        with ProgressBar(name, progress) as bar:
            tensor: Tensor = self._do_with(
                lambda: self._rules.copied({"array": array}),
                lambda: self._rules.put(name, array, bar, placement, axis, if_match),
            )
        return tensor

    def put_file(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        placement: Placement | None = None,
        axis: int | None = None,
        progress: bool | None = None,
    ) -> list[Tensor]:
        """Stores the tensors of a file; npy and safetensors files are sent as they lie, without a copy in memory.

        Args:
            path: Ends in .npy, .npz or .safetensors.
            name: Name of the one tensor, or the prefix of several; the file's name without its ending by default.
            placement: As for `put`, of each.
            axis: As for `put`.
            progress: As for `put`.

        Raises:
            OSError: The file cannot be read.
            ValueError: Another format.
            QuotaExceeded: It does not fit beside the others.
        """
        source = Source(Path(path))
        arrays = requests.sources(source.path.stem if name is None else name, source)
        return [
            self.put(full, array, placement=placement, axis=axis, progress=progress) for full, array in arrays.items()
        ]

    def get(
        self,
        name: str,
        *,
        if_match: IfMatch | None = None,
        progress: bool | None = None,
    ) -> Array:
        """Fetches a resident tensor.

        Args:
            name: Name, with or without the `@`.
            if_match: Version, or several, of which the tensor must have one; see `put`.
            progress: As for `put`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        with ProgressBar(name, progress) as bar:
            array: Array = self._do(requests.get(name, progress=bar, if_match=if_match))
        return array

    def get_file(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        if_match: IfMatch | None = None,
        progress: bool | None = None,
    ) -> Path:
        """Fetches a resident tensor into a file, without a copy in memory. The file is replaced whole or not at all.

        Args:
            name: Name, with or without the `@`.
            path: Ends in .npy or .safetensors.
            if_match: As for `get`.
            progress: As for `put`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
            OSError: The file cannot be written.
            ValueError: Another format.
        """
        with Destination(Path(path)) as into, ProgressBar(name, progress) as bar:
            written: Path = self._do(requests.get(name, into, bar, if_match))
        return written

    def head(self, name: str) -> TensorInfo | None:
        """Describes a resident tensor, or returns None where there is none of that name."""
        return self._do(requests.head(name))

    def delete(self, name: str, *, if_match: IfMatch | None = None) -> None:
        """Removes a resident tensor.

        Args:
            name: Name, with or without the `@`.
            if_match: As for `put`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        self._do(requests.delete(name, if_match))


class Tensor(Resident):
    """A handle of a resident tensor: an operand by itself, as in `x @ w`.

    Attributes:
        name: Name without the `@`.
    """

    __slots__ = ("_client",)

    def __init__(self, client: TensorCalls, name: str, described: TensorInfo | None = None) -> None:
        super().__init__(name, described)
        self._client = client

    def describe(self) -> TensorInfo:
        """Fetches the description, which the handle then keeps.

        Raises:
            NotFound: No tensor of that name.
        """
        self._described = requests.there(self._client.head(self.name), self.name)
        return self._described

    def fetch(self, *, if_match: IfMatch | None = None) -> Array:
        """Fetches the elements.

        Args:
            if_match: As for `Client.get`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        return self._client.get(self.name, if_match=if_match)

    def delete(self, *, if_match: IfMatch | None = None) -> None:
        """Removes the tensor from the server.

        Args:
            if_match: As for `Client.put`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        self._client.delete(self.name, if_match=if_match)

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


class Tensors(ByName):
    """The resident tensors of a server, by name. Calling it lists them."""

    def __init__(self, client: TensorCalls) -> None:
        self._client = client

    def __getitem__(self, name: str) -> Tensor:
        return Tensor(self._client, tensor_name(name))

    def __call__(self) -> list[Tensor]:
        """Lists the resident tensors, described."""
        return self._client._do(requests.tensors())

    # <sync>
    def __setitem__(self, name: str, array: Operand) -> None:
        self._client.put(name, array)

    def __delitem__(self, name: str) -> None:
        self._client.delete(name)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._client.head(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter([tensor.name for tensor in self()])

    def __len__(self) -> int:
        return len(self())

    # </sync>
    def __repr__(self) -> str:
        return f"<tensors of {self._client!r}>"

"""Calls of ops and of resident tensors, and the handles of tensors: the part of the asyncio client that sends nothing itself.

Written from `tensors.py` by `python -m tests.support.async_client`: change that file.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
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


class AsyncTensorCalls(abc.ABC):
    """Calls of ops and of resident tensors.

    Args:
        rules: Choices that hold for each request.

    Attributes:
        tensors: The resident tensors, by name.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.tensors = AsyncTensors(self)

    @abc.abstractmethod
    async def _send(self, call: wire.Call) -> wire.Reply:
        """Sends a call, again where that may help, and returns the last reply."""

    async def _offload(self, work: Callable[[], T], _find: Callable[[], Sequence[Any]]) -> T:
        """Returns the result of work that converts or copies the arrays that `_find` finds."""
        return work()

    async def _do(self, request: Request[T]) -> T:
        reply = await self._send(request.call)
        return await self._offload(lambda: request.parse(reply, self._handle), lambda: request.copied_from(reply))

    async def _do_with(self, find: Callable[[], Sequence[Any]], make: Callable[[], Request[T]]) -> T:
        """Does a request that is made of arrays which may have to be converted or copied."""
        return await self._do(await self._offload(make, find))

    def _handle(self, info: TensorInfo) -> AsyncTensor:
        return AsyncTensor(self, info.name, info)

    # ── ops ───────────────────────────────────────────────────────────────────────────────────────

    @overload
    async def matmul(self, a: Operand, b: Operand, *, store: str, **options: Unpack[MatmulOptions]) -> AsyncTensor: ...
    @overload
    async def matmul(
        self, a: HostOperand, b: HostOperand, *, store: None = None, **options: Unpack[MatmulOptions]
    ) -> Array: ...
    @overload
    async def matmul(
        self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[MatmulOptions]
    ) -> Any: ...
    async def matmul(
        self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[MatmulOptions]
    ) -> Any:
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
        return (await self.run("matmul", {"a": a, "b": b}, store=store, **options)).result

    @overload
    async def softmax(self, x: Operand, *, store: str, **options: Unpack[SoftmaxOptions]) -> AsyncTensor: ...
    @overload
    async def softmax(self, x: HostOperand, *, store: None = None, **options: Unpack[SoftmaxOptions]) -> Array: ...
    @overload
    async def softmax(self, x: Operand, *, store: str | None = None, **options: Unpack[SoftmaxOptions]) -> Any: ...
    async def softmax(self, x: Operand, *, store: str | None = None, **options: Unpack[SoftmaxOptions]) -> Any:
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
        return (await self.run("softmax", {"x": x}, store=store, **with_one_axis(options))).result

    @overload
    async def add(self, a: Operand, b: Operand, *, store: str, **options: Unpack[AddOptions]) -> AsyncTensor: ...
    @overload
    async def add(
        self, a: HostOperand, b: HostOperand, *, store: None = None, **options: Unpack[AddOptions]
    ) -> Array: ...
    @overload
    async def add(self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[AddOptions]) -> Any: ...
    async def add(self, a: Operand, b: Operand, *, store: str | None = None, **options: Unpack[AddOptions]) -> Any:
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
        return (await self.run("add", {"a": a, "b": b}, store=store, **options)).result

    @overload
    async def search(
        self, queries: HostOperand, items: HostOperand, k: int = 10, **options: Unpack[SearchOptions]
    ) -> TopK[Array]: ...
    @overload
    async def search(
        self, queries: Operand, items: Operand, k: int = 10, **options: Unpack[SearchOptions]
    ) -> TopK[Any]: ...
    async def search(
        self, queries: Operand, items: Operand, k: int = 10, **options: Unpack[SearchOptions]
    ) -> TopK[Any]:
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
        result: TopK[Any] = (await self.run("search", {"a": queries, "b": items}, k=k, **options)).result
        return result

    @overload
    async def topk(self, x: HostOperand, k: int, **options: Unpack[TopKOptions]) -> TopK[Array]: ...
    @overload
    async def topk(self, x: Operand, k: int, **options: Unpack[TopKOptions]) -> TopK[Any]: ...
    async def topk(self, x: Operand, k: int, **options: Unpack[TopKOptions]) -> TopK[Any]:
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
        result: TopK[Any] = (await self.run("topk", {"x": x}, k=k, **with_one_axis(options))).result
        return result

    @overload
    async def reduce(
        self, x: Operand, kind: ReduceKind, *, store: str, **options: Unpack[ReduceOptions]
    ) -> AsyncTensor: ...
    @overload
    async def reduce(
        self, x: HostOperand, kind: ReduceKind, *, store: None = None, **options: Unpack[ReduceOptions]
    ) -> Array: ...
    @overload
    async def reduce(
        self, x: Operand, kind: ReduceKind, *, store: str | None = None, **options: Unpack[ReduceOptions]
    ) -> Any: ...
    async def reduce(
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
        return (await self.run("reduce", {"x": x}, store=store, kind=kind, **axis, **rest)).result

    @overload
    async def normalize(
        self, x: Operand, kind: NormalizeKind, *, store: str, **options: Unpack[NormalizeOptions]
    ) -> AsyncTensor: ...
    @overload
    async def normalize(
        self, x: HostOperand, kind: NormalizeKind, *, store: None = None, **options: Unpack[NormalizeOptions]
    ) -> Array: ...
    @overload
    async def normalize(
        self, x: Operand, kind: NormalizeKind, *, store: str | None = None, **options: Unpack[NormalizeOptions]
    ) -> Any: ...
    async def normalize(
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
        return (await self.run("normalize", {"x": x}, store=store, kind=kind, **options)).result

    @overload
    async def pointwise(
        self, fn: PointwiseFunction, x: Operand, y: Operand = None, *, store: str, **options: Unpack[PointwiseOptions]
    ) -> AsyncTensor: ...
    @overload
    async def pointwise(
        self,
        fn: PointwiseFunction,
        x: HostOperand,
        y: HostOperand | None = None,
        *,
        store: None = None,
        **options: Unpack[PointwiseOptions],
    ) -> Array: ...
    @overload
    async def pointwise(
        self,
        fn: PointwiseFunction,
        x: Operand,
        y: Operand = None,
        *,
        store: str | None = None,
        **options: Unpack[PointwiseOptions],
    ) -> Any: ...
    async def pointwise(
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
        return (await self.run("pointwise", {"x": x, "y": y}, store=store, fn=fn, **options)).result

    async def run(
        self, op: str, operands: Mapping[str, Operand], *, store: str | None = None, **options: Any
    ) -> Answer:
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
        return await self._do_with(
            lambda: self._rules.copied(operands, options), lambda: self._rules.op(op, operands, options, store)
        )

    # ── resident tensors ──────────────────────────────────────────────────────────────────────────

    async def put(
        self,
        name: str,
        array: Operand,
        *,
        placement: Placement | None = None,
        axis: int | None = None,
        if_match: IfMatch | None = None,
        progress: bool | None = None,
    ) -> AsyncTensor:
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
            tensor: AsyncTensor = await self._do_with(
                lambda: self._rules.copied({"array": array}),
                lambda: self._rules.put(name, array, bar, placement, axis, if_match),
            )
        return tensor

    async def put_file(
        self,
        path: str | os.PathLike[str],
        name: str | None = None,
        *,
        placement: Placement | None = None,
        axis: int | None = None,
        progress: bool | None = None,
    ) -> list[AsyncTensor]:
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
            await self.put(full, array, placement=placement, axis=axis, progress=progress)
            for full, array in arrays.items()
        ]

    async def get(
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
            array: Array = await self._do(requests.get(name, progress=bar, if_match=if_match))
        return array

    async def get_file(
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
            written: Path = await self._do(requests.get(name, into, bar, if_match))
        return written

    async def head(self, name: str) -> TensorInfo | None:
        """Describes a resident tensor, or returns None where there is none of that name."""
        return await self._do(requests.head(name))

    async def delete(self, name: str, *, if_match: IfMatch | None = None) -> None:
        """Removes a resident tensor.

        Args:
            name: Name, with or without the `@`.
            if_match: As for `put`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        await self._do(requests.delete(name, if_match))


class AsyncTensor(Resident):
    """A handle of a resident tensor: an operand by itself, as in `x @ w`.

    Attributes:
        name: Name without the `@`.
    """

    __slots__ = ("_client",)

    def __init__(self, client: AsyncTensorCalls, name: str, described: TensorInfo | None = None) -> None:
        super().__init__(name, described)
        self._client = client

    async def describe(self) -> TensorInfo:
        """Fetches the description, which the handle then keeps.

        Raises:
            NotFound: No tensor of that name.
        """
        self._described = requests.there(await self._client.head(self.name), self.name)
        return self._described

    async def fetch(self, *, if_match: IfMatch | None = None) -> Array:
        """Fetches the elements.

        Args:
            if_match: As for `Client.get`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        return await self._client.get(self.name, if_match=if_match)

    async def delete(self, *, if_match: IfMatch | None = None) -> None:
        """Removes the tensor from the server.

        Args:
            if_match: As for `Client.put`.

        Raises:
            NotFound: No tensor of that name.
            PreconditionFailed: It has no such version.
        """
        await self._client.delete(self.name, if_match=if_match)

    async def __matmul__(self, other: Operand) -> Any:
        return await self._client.matmul(self, other)

    async def __rmatmul__(self, other: Operand) -> Any:
        return await self._client.matmul(other, self)

    async def __add__(self, other: Operand) -> Any:
        return await self._client.add(self, other)

    async def __radd__(self, other: Operand) -> Any:
        return await self._client.add(other, self)

    async def __sub__(self, other: Operand) -> Any:
        return await self._client.add(self, other, alpha=-1)

    async def __rsub__(self, other: Operand) -> Any:
        return await self._client.add(other, self, alpha=-1)

    async def __mul__(self, other: Operand) -> Any:
        return await self._client.pointwise("mul", self, other)

    async def __rmul__(self, other: Operand) -> Any:
        return await self._client.pointwise("mul", other, self)

    async def __truediv__(self, other: Operand) -> Any:
        return await self._client.pointwise("div", self, other)

    async def __rtruediv__(self, other: Operand) -> Any:
        return await self._client.pointwise("div", other, self)


class AsyncTensors(ByName):
    """The resident tensors of a server, by name. Calling it lists them."""

    def __init__(self, client: AsyncTensorCalls) -> None:
        self._client = client

    def __getitem__(self, name: str) -> AsyncTensor:
        return AsyncTensor(self._client, tensor_name(name))

    async def __call__(self) -> list[AsyncTensor]:
        """Lists the resident tensors, described."""
        return await self._client._do(requests.tensors())

    def __repr__(self) -> str:
        return f"<tensors of {self._client!r}>"

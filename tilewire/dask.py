"""Computes blocks of dask arrays on Tilewire services. Needs the extra `dask`.

import dask.array as da
import tilewire.dask

services = tilewire.dask.Services(["http://host-1:8000", "http://host-2:8000"])
product = tilewire.dask.matmul(a, b, services).compute()

Arrays may be larger than any host: blocks are computed where dask runs its tasks, each by a request to one service. Workers
need no GPU. A block that is used many times becomes a resident, named by its content, on one of the services.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tilewire._arrays.dtypes import DTYPES
from tilewire._arrays.host import HostArray
from tilewire._clients.client import Client
from tilewire._errors import Busy, ConnectionFailed, NotFound, QuotaExceeded, TilewireError, Unavailable
from tilewire._installing import how_to_install
from tilewire._transport.of_process import OfProcess

try:
    import dask.array as da
    from dask.delayed import delayed
except ModuleNotFoundError as error:  # pragma: no cover
    raise ModuleNotFoundError(f"tilewire.dask needs dask; run: {how_to_install('dask')}", name=error.name) from error

Array = npt.NDArray[Any]

_PREFIX = "dask/"
# As the services refuse it of one request. ADR 0051 has the reason.
_MAX_INT8_SUM = 2**17 - 1
_DIGEST_BYTES = 16
# A service that did not answer is tried last for so long.
_AVOIDED_S = 5.0
_FIRST_WAIT_S = 0.1
_MAX_WAIT_S = 2.0
# Errors after which another service may answer.
_ELSEWHERE = (ConnectionFailed, Unavailable, Busy)


@dataclass(frozen=True)
class Services:
    """Services that compute blocks; may be sent to workers of dask.distributed.

    Attributes:
        urls: Addresses, `http://…`.
        api_key: Sent as `Authorization: Bearer …`.
        timeout_s: Seconds after which a block is given up that no service computes.
    """

    urls: Sequence[str]
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if isinstance(self.urls, str) or not self.urls:
            raise ValueError("urls: expected one address or more, in a list")
        object.__setattr__(self, "urls", tuple(self.urls))

    def in_order(self, key: str) -> list[str]:
        """Addresses by rendezvous hash: the first is a block's home, the others follow when it does not answer.

        Args:
            key: Content key of the block.
        """
        return sorted(self.urls, key=lambda url: hashlib.blake2b(f"{url} {key}".encode()).digest())


@dataclass(frozen=True)
class Block:
    """One block and the name that its content gives it.

    Attributes:
        name: Name as a resident: blocks of equal bytes, shape and dtype share it.
        array: Values.
    """

    name: str
    array: Array

    @classmethod
    def of(cls, array: Array) -> Block:
        """Names a block by its content.

        Raises:
            TypeError: A masked array with masked elements.
        """
        given = HostArray.of(array)
        host = HostArray(given.dtype, np.ascontiguousarray(given.data))
        digest = hashlib.blake2b(f"{host.dtype}{host.shape}".encode(), digest_size=_DIGEST_BYTES)
        digest.update(host.data.reshape(-1).view(np.uint8).data)
        return cls(_PREFIX + digest.hexdigest(), host.numpy())


def matmul(a: da.Array, b: da.Array, services: Services, *, precision: str | None = None) -> da.Array:
    """Computes a @ b block by block; partial products are summed in float32, or in int32 for int8.

    Args:
        a: (M, K), float16, bfloat16, float32 or int8. Its blocks travel with the requests.
        b: (K, N) of the same dtype. Each block is uploaded once to a service, and stays there.
        services: Services that compute.
        precision: As in `MatmulOptions`, for float32.

    Returns:
        (M, N) of the dtype of `a` (int8: int32), in the row blocks of `a` and the column blocks of `b`.

    Raises:
        TypeError: Not dask arrays, or of a dtype that no service multiplies.
        ValueError: Ranks, shapes or dtypes that do not fit, more columns than int32 sums of int8 hold, or blocks of
            unknown size.
    """
    _check_blocks("a", a, "matmul", 2)
    _check_blocks("b", b, "matmul", 2)
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"b: has {b.shape[0]} rows; expected {a.shape[1]}, as many as a has columns")
    if a.dtype != b.dtype:
        raise ValueError(f"b: has dtype {b.dtype}; expected {a.dtype}, that of a")
    if a.dtype == np.int8 and a.shape[1] > _MAX_INT8_SUM:
        raise ValueError(f"K = {a.shape[1]} overflows the int32 accumulator of int8; the limit is {_MAX_INT8_SUM}")
    sums = np.dtype(np.int32 if a.dtype == np.int8 else np.float32)
    result = sums if a.dtype == np.int8 else a.dtype
    options = {} if precision is None else {"precision": precision}
    lefts = a.to_delayed()
    rights = [[delayed(Block.of)(block) for block in row] for row in b.rechunk({0: a.chunks[1]}).to_delayed()]
    rows = []
    for left, height in zip(lefts, a.chunks[0], strict=True):
        row = []
        for column, width in enumerate(b.chunks[1]):
            block = delayed(_product)(
                services, list(left), [right[column] for right in rights], (height, width), sums, result, options
            )
            row.append(da.from_delayed(block, (height, width), result))
        rows.append(row)
    return da.block(rows)


def softmax(x: da.Array, services: Services, *, axis: int = -1, log: bool = False) -> da.Array:
    """Computes softmax or log-softmax along one axis, which is joined into one block first.

    Args:
        x: Rank 1 or more, float16, bfloat16 or float32.
        services: Services that compute.
        axis: Axis of the sums.
        log: Whether to compute the logarithm.

    Returns:
        Shape and dtype of `x`.

    Raises:
        TypeError: Not a dask array, or a dtype that no service takes.
        ValueError: An axis that `x` does not have, or blocks of unknown size.
    """
    axis = _check_axis(x, axis, "softmax")
    joined = x.rechunk({axis: -1})
    options = {"axis": axis, "log": log}
    return joined.map_blocks(_run_block, services, "softmax", "x", options, dtype=x.dtype, meta=joined._meta)


def total(x: da.Array, services: Services, *, axis: int = -1) -> da.Array:
    """Computes the sum along one axis: products of blocks with a resident vector of ones, then sums of those.

    Args:
        x: Rank 1 or more, float16, bfloat16 or float32.
        services: Services that compute.
        axis: Axis of the sum.

    Returns:
        `x` without the axis, float32.

    Raises:
        TypeError: Not a dask array, or a dtype that no service takes.
        ValueError: An axis that `x` does not have, or blocks of unknown size.
    """
    axis = _check_axis(x, axis, "reduce")
    if 0 in x.shape:
        # Nothing to send; and rows without elements have no number.
        return da.zeros(x.shape[:axis] + x.shape[axis + 1 :], dtype=np.float32)
    last = da.moveaxis(x, axis, -1)
    rows = last.reshape((-1, last.shape[-1])) if last.ndim != 2 else last
    ones = da.ones((rows.shape[1], 1), chunks=(rows.chunks[1], 1), dtype=x.dtype)
    wide = {"out_dtype": "float32"}
    parts = da.blockwise(
        _row_sums, "ik", rows, "ik", ones, "kj", services=services, options=wide, dtype=np.float32,
        adjust_chunks={"k": 1}, concatenate=True, meta=np.empty((0, 0), dtype=np.float32),
    )  # fmt: skip
    return parts.sum(axis=1, dtype=np.float32).reshape(last.shape[:-1])


def mean(x: da.Array, services: Services, *, axis: int = -1) -> da.Array:
    """Computes the mean along one axis, as `total` does the sum; float32."""
    axis = _check_axis(x, axis, "reduce")
    return total(x, services, axis=axis) / np.float32(x.shape[axis])


# ── on the workers ────────────────────────────────────────────────────────────────────────────────


def _product(
    services: Services,
    lefts: Sequence[Array],
    rights: Sequence[Block],
    shape: tuple[int, int],
    sums: np.dtype[Any],
    result: np.dtype[Any],
    options: Mapping[str, Any],
) -> Array:
    """One block of a product: a row of blocks times a column of blocks."""
    out = np.zeros(shape, dtype=sums)
    for left, right in zip(lefts, rights, strict=True):
        out += _pools.get().of(services).run("matmul", {"a": left}, {"b": right}, {**options, "out_dtype": sums.name})
    return out.astype(result, copy=False)


def _run_block(array: Array, services: Services, op: str, name: str, options: Mapping[str, Any]) -> Array:
    return _pools.get().of(services).run(op, {name: array}, {}, options)


class _Pool:
    """Connections of one process to the services, and what it found out about them. Safe to share between threads.

    Args:
        services: The services.
    """

    def __init__(self, services: Services) -> None:
        self._services = services
        self._clients = {url: Client(url, api_key=services.api_key, max_retries=0) for url in services.urls}
        self._avoided_until = dict.fromkeys(services.urls, 0.0)
        self._uploads: defaultdict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)
        self._guard = threading.Lock()

    def run(
        self, op: str, arrays: Mapping[str, Array], residents: Mapping[str, Block], options: Mapping[str, Any]
    ) -> Array:
        """Runs an op on the home of its residents, or on another service when that does not answer.

        Args:
            op: Name of the op.
            arrays: Inputs that travel with the request.
            residents: Inputs that stay on the service.
            options: Options of the op.

        Raises:
            TilewireError: No service computed it within the time, or one refused it.
        """
        key = next((block.name for block in residents.values()), "") or f"{time.monotonic_ns()}"
        end_s = time.monotonic() + self._services.timeout_s
        for wait_s in _waits():
            for url in self._by_hope(self._services.in_order(key)):
                try:
                    return self._run_on(url, op, arrays, residents, options)
                except _ELSEWHERE as error:
                    trouble: TilewireError = error
                    self._avoided_until[url] = time.monotonic() + _AVOIDED_S
            if time.monotonic() + wait_s > end_s:
                raise trouble
            time.sleep(wait_s)
        raise AssertionError("This is a bug: waits never end.")

    def close(self) -> None:
        """Closes the connections."""
        for client in self._clients.values():
            client.close()

    def _by_hope(self, urls: Sequence[str]) -> list[str]:
        now = time.monotonic()
        return sorted(urls, key=lambda url: self._avoided_until[url] > now)

    def _run_on(
        self,
        url: str,
        op: str,
        arrays: Mapping[str, Array],
        residents: Mapping[str, Block],
        options: Mapping[str, Any],
    ) -> Array:
        client = self._clients[url]
        named = {name: f"@{block.name}" for name, block in residents.items()}
        try:
            result = client.run(op, {**arrays, **named}, **options).result
        except NotFound:
            sent = {
                name: f"@{block.name}" if self._upload(url, block) else block.array for name, block in residents.items()
            }
            result = client.run(op, {**arrays, **sent}, **options).result
        assert isinstance(result, np.ndarray), "This is a bug: nothing was stored."
        return result

    def _upload(self, url: str, block: Block) -> bool:
        """Uploads a block where it is not yet; returns whether it is there. Without room it travels with the request."""
        with self._guard:
            lock = self._uploads[url, block.name]
        with lock:
            client = self._clients[url]
            try:
                if client.head(block.name) is None:
                    client.put(block.name, block.array)
            except QuotaExceeded:
                return False
            return True


class _Pools:
    """Pools of connections. They are kept over tasks: a worker gets an equal `Services` with each."""

    def __init__(self) -> None:
        self._made: dict[Services, _Pool] = {}
        self._guard = threading.Lock()

    def of(self, services: Services) -> _Pool:
        with self._guard:
            if services not in self._made:
                self._made[services] = _Pool(services)
            return self._made[services]

    def close(self) -> None:
        with self._guard:
            for pool in self._made.values():
                pool.close()
            self._made.clear()


_pools = OfProcess(_Pools)


def close() -> None:
    """Closes the connections of this process; later blocks open new ones."""
    _pools.get().close()


def _waits() -> Iterator[float]:
    wait_s = _FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _row_sums(rows: Array, ones: Array, *, services: Services, options: Mapping[str, Any]) -> Array:
    return _pools.get().of(services).run("matmul", {"a": rows}, {"b": Block.of(ones)}, options)


# ── checks ────────────────────────────────────────────────────────────────────────────────────────


def _check_blocks(name: str, array: da.Array, op: str, rank: int | None = None) -> None:
    if not isinstance(array, da.Array):
        raise TypeError(f"{name}: expected a dask array, got {type(array).__name__}; type da.from_array({name})")
    if array.dtype.name not in DTYPES[op]:
        dtypes = ", ".join(DTYPES[op])
        raise TypeError(f"{name}: {op} does not take {array.dtype}; type {name}.astype(np.float32); it takes {dtypes}")
    if rank is not None and array.ndim != rank:
        raise ValueError(f"{name}: has rank {array.ndim}; expected {rank}")
    if any(np.isnan(size) for sizes in array.chunks for size in sizes):
        raise ValueError(f"{name}: has blocks of unknown size; expected known ones, see compute_chunk_sizes()")


def _check_axis(x: da.Array, axis: int, op: str) -> int:
    _check_blocks("x", x, op)
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"axis: {axis} is out of range for rank {x.ndim}")
    return axis % x.ndim

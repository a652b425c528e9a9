"""The public grouped matmul: checks its products, writes their table to the device, and launches once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl

from tilewire.kernels.matmul.configs import (
    ACTIVATIONS,
    OUT_DTYPES,
    cdiv,
    precisions_of,
    resolve_precision,
)
from tilewire.kernels.matmul.grouped.kernel import matmul_grouped_kernel
from tilewire.kernels.matmul.members import is_supported
from tilewire.kernels.matmul.op import check_product
from tilewire.kernels.matmul.plan import Epilogue
from tilewire.kernels.runtime.binaries import binary
from tilewire.kernels.runtime.kinds import ITEM_BYTES, KINDS, name_of, unit_of
from tilewire.kernels.runtime.launch import Launch, LaunchCache, Variant
from tilewire.kernels.runtime.targets import Target, current

MAX_GROUPS = 256
TABLE_FIELDS = 11
_BLOCK_M, _BLOCK_N = 64, 64
_FLOAT8 = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5}


def grouped_matmul(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    activation: str = "none",
    out_dtype: torch.dtype | None = None,
    precision: str = "ieee",
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """act(a[i] @ b[i] + bias[i]) for every i, in one launch for each 256 products.

    Args:
        a: (M_i, K_i), rows contiguous; one dtype for all, as in `matmul`.
        b: (K_i, N_i), rows contiguous for all, or columns contiguous for all.
        bias: (N_i,), one dtype for all.
        activation: as in `matmul`.
        out_dtype: as in `matmul`.
        precision: as in `matmul`.
        out: (M_i, N_i), rows contiguous; written instead of new tensors.

    Returns:
        One (M_i, N_i) for each product.

    Raises:
        ValueError: a product cannot be right, or the products differ in dtype or layout.
    """
    if len(a) != len(b) or (bias is not None and len(bias) != len(a)) or (out is not None and len(out) != len(a)):
        raise ValueError("a, b, bias and out must be as many")
    biases: Sequence[torch.Tensor | None] = [None] * len(a) if bias is None else bias
    checked = [
        check_product(left, right, Epilogue(bias=extra, activation=activation), out_dtype, precision)
        for left, right, extra in zip(a, b, biases, strict=True)
    ]
    if out is None:
        out = [
            torch.empty(shape, dtype=dtype, device=left.device) for (shape, dtype), left in zip(checked, a, strict=True)
        ]
    for start in range(0, len(a), MAX_GROUPS):
        part = slice(start, start + MAX_GROUPS)
        launcher = GroupedLaunch(a[part], b[part], out[part], biases[part], activation, precision)
        launcher()
    return list(out)


class GroupedLaunch:
    """Up to `MAX_GROUPS` checked products, with their table on the device, ready to launch any number of times.

    Args:
        a: (M_i, K_i).
        b: (K_i, N_i).
        out: (M_i, N_i).
        bias: (N_i,), or None for all.
        activation: as in `matmul`.
        precision: as in `matmul`.

    Raises:
        ValueError: the products differ in dtype or layout.
    """

    def __init__(
        self,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        bias: Sequence[torch.Tensor | None],
        activation: str = "none",
        precision: str = "ieee",
    ) -> None:
        b_major = _common_layout(a, b, out)
        products = [four for four in zip(a, b, out, bias, strict=True) if four[2].numel() > 0]
        self._keep = products
        self.variant: Variant | None = None
        if not products:
            return
        unit = 16 // a[0].element_size()
        is_aligned = all(_is_aligned(left, right, b_major, unit) for left, right, _, _ in products)
        rows, self._num_tiles = _rows(products, b_major)
        self._table = _upload(rows, a[0].device)
        self._kind = GroupKind(
            name_of(a[0].dtype),
            precision,
            b_major,
            is_aligned,
            name_of(out[0].dtype),
            Epilogue(products[0][3]).spec.bias_dtype,
            activation,
        )
        self.variant = self._kind.variant(current(a[0].get_device()))

    def __call__(self) -> None:
        """Launch on the current stream."""
        if self._keep:
            launch_table(self._table, self._num_tiles, self._kind)


class GroupKind(NamedTuple):
    """All that a grouped launch depends on besides its table.

    Attributes:
        dtype: name of the inputs' dtype.
        precision: as in `matmul`.
        b_major: `n` or `k`, the contiguous dimension of every `b`.
        is_aligned: whether all operands can be read in 16-byte pieces.
        out_dtype: name of the outputs' dtype.
        bias_dtype: that of the biases, empty for none.
        activation: as in `matmul`.
    """

    dtype: str
    precision: str
    b_major: str
    is_aligned: bool
    out_dtype: str
    bias_dtype: str = ""
    activation: str = "none"

    def variant(self, target: Target) -> Variant:
        """The binary."""
        item_bytes = ITEM_BYTES[self.dtype]
        precision = resolve_precision(self.precision if self.precision in _precisions(self.dtype) else "ieee", target)
        # Unaligned operands are addressed element by element: a step of 128 bytes would need more registers than there are.
        block_k = 128 // item_bytes if self.is_aligned and not (self.dtype == "float32" and precision == "ieee") else 32
        constants: dict[str, Any] = {
            "DTYPE": _FLOAT8.get(self.dtype) or getattr(tl, self.dtype),
            "B_MAJOR": self.b_major,
            "UNIT": unit_of(self.dtype, is_aligned=self.is_aligned),
            "PRECISION": precision,
            "IMPRECISE_K": block_k if self.dtype.startswith("float8") else None,
            "UPCAST": target.backend == "interpreter" and self.dtype == "bfloat16",
            "BLOCK_M": _BLOCK_M,
            "BLOCK_N": _BLOCK_N,
            "BLOCK_K": block_k,
            "MAX_GROUPS": MAX_GROUPS,
        }
        stages = 2 if target.backend == "hip" else 4
        types = {"table_ptr": "*i64"}
        return binary(matmul_grouped_kernel, types, constants, 4, target, ("table_ptr",), num_stages=stages)


def launch_table(table: torch.Tensor, num_tiles: int, kind: GroupKind) -> None:
    """Launch the products that a table describes on the current stream; the caller vouches for it.

    Args:
        table: int64 (groups, `TABLE_FIELDS`), contiguous, on the device; up to `MAX_GROUPS` rows. See the kernel.
        num_tiles: of all products; see `tiles_of`.
        kind: what they have in common.
    """
    target = current(table.get_device())

    def make() -> Launch:
        values = {
            "groups": 0,
            "num_tiles": 0,
            "out_kind": KINDS[kind.out_dtype],
            "bias_kind": KINDS[kind.bias_dtype],
            "activation": ACTIVATIONS.index(kind.activation),
        }
        return Launch(kind.variant(target), (1,), values, table.device)

    launch = _launches.get((kind, table.device), make)
    launch.resize((min(num_tiles, 4 * target.num_sms), 1, 1), groups=len(table), num_tiles=num_tiles)
    launch(table)


_launches: LaunchCache[Launch] = LaunchCache()


def tiles_of(m: int, n: int) -> int:
    """Tiles of an (m, n) product."""
    return cdiv(m, _BLOCK_M) * cdiv(n, _BLOCK_N)


_Product = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _common_layout(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> str:
    """`n` or `k`: the contiguous dimension of every `b`."""
    if len({tensor.dtype for tensor in a}) > 1 or len({tensor.dtype for tensor in out}) > 1:
        raise ValueError("the products of a group must have one dtype")
    if not all(tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 for tensor in (*a, *out)):
        raise ValueError("a and out: rows must be contiguous in a group")
    filled = [tensor for tensor in b if tensor.numel() > 0]
    if all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in filled):
        return "n"
    if all(tensor.stride(-2) == 1 or tensor.shape[-2] == 1 for tensor in filled):
        return "k"
    raise ValueError("b: rows, or columns, must be contiguous in all products of a group")


def _is_aligned(a: torch.Tensor, b: torch.Tensor, b_major: str, unit: int) -> bool:
    step, whole = (b.stride(0), b.shape[1]) if b_major == "n" else (b.stride(1), a.shape[1])
    starts = (a.data_ptr() | b.data_ptr()) % 16 == 0
    return starts and all(size % unit == 0 for size in (a.stride(0), a.shape[1], step, whole))


def _rows(products: Sequence[_Product], b_major: str) -> tuple[list[list[int]], int]:
    """The table, and the number of tiles of all products."""
    tiles = [tiles_of(*out.shape) for _, _, out, _ in products]
    firsts = itertools.accumulate(tiles, initial=0)
    rows = []
    for (a, b, out, bias), first in zip(products, firsts, strict=False):
        addresses = [a.data_ptr(), b.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()]
        sizes = [out.shape[0], out.shape[1], a.shape[1]]
        rows.append([*addresses, *sizes, a.stride(0), b.stride(0 if b_major == "n" else 1), out.stride(0), first])
    return rows, sum(tiles)


def _upload(rows: list[list[int]], device: torch.device) -> torch.Tensor:
    table = torch.tensor(rows, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


def _precisions(dtype: str) -> tuple[str, ...]:
    # Groups have no fast sums: their products are small.
    return tuple(precision for precision in precisions_of(dtype) if precision != "fast")


def members(target: Target) -> Iterator[tuple[GroupKind]]:
    """Kinds whose binaries `grouped_matmul` can launch on `target`; outputs and epilogues are passed at run time."""
    for dtype in filter(functools.partial(is_supported, target=target), OUT_DTYPES):
        for precision, b_major, is_aligned in itertools.product(_precisions(dtype), "nk", (True, False)):
            yield (GroupKind(dtype, precision, b_major, is_aligned, OUT_DTYPES[dtype][0]),)

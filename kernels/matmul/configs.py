"""Which matmul kernel runs a product, with which block sizes. Pure: no torch, no Triton, no device.

A product is reduced to a `Problem`, a `Problem` and a `Target` to a `Config`. Sizes only choose among configurations
through buckets, so that the set of binaries is finite.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tilewire.kernels.runtime.kinds import ITEM_BYTES
from tilewire.kernels.runtime.targets import Target

ACTIVATIONS = ("none", "relu", "leaky_relu", "gelu", "silu", "sigmoid", "tanh")
# `tf32` and `tf32x3` are for float32 inputs. `fast` is for float8: sums stay in the matrix unit, which keeps some 13 bits.
PRECISIONS = ("tf32", "tf32x3", "ieee", "fast")
OUT_DTYPES = {
    "float16": ("float16", "bfloat16", "float32"),
    "bfloat16": ("bfloat16", "float16", "float32"),
    "float32": ("float32", "float16", "bfloat16"),
    "int8": ("int32", "float32", "float16", "bfloat16"),
    "float8_e4m3fn": ("bfloat16", "float16", "float32"),
    "float8_e5m2": ("bfloat16", "float16", "float32"),
}
# Kernels that multiply float32 for `tf32x3` by limbs: operands are copied first, rounded to tf32, with what is left of them
# beside that. Three products of limbs are one of tf32, along a K three times as long. Others multiply float32 as it is.
LIMB_KERNELS = frozenset({"tma", "pointer"})
LIMBS_OF_K = 3
# Kernels that read their operands through descriptors, box by box.
BOX_KERNELS = frozenset({"tma", "wgmma"})
# Rows (swapped: columns) of a tile that one consumer of the kernel for Hopper multiplies, and its warps.
CONSUMER_ROWS, CONSUMER_WARPS = 64, 4
# Shared memory of the kernel for Hopper beside operands and sums, and what the device keeps of it for each program.
_BARRIER_BYTES, _KEPT_BYTES = 2048, 1024
# Most programs of it on a multiprocessor, by consumers of a program: with more, a thread has too few registers.
_MOST_PROGRAMS = {1: 3, 2: 2, 3: 1}
# What programs of a cluster of it may share; see `Config.shares`.
SHARES = ("a", "b", "a4")
# Bytes of K that one line of a box in shared memory has.
_LINE_OF_BOX = 128
# Rows of the right operand that one box takes, unless a larger power of two.
_LARGEST_BOX = 128
# How the steps of scales are passed to the kernels; see `kernels.matmul.epilogue`.
SCALE_STEPS = {"none": -1, "one": 0, "each": 1}
# The largest K whose int8 products cannot overflow an int32 accumulator, each of them -128 × -128 = 2^14.
MAX_INT8_K = 2**17 - 1


@dataclass(frozen=True)
class Problem:
    """One product as the choice of a kernel sees it.

    Attributes:
        m: rows of op(a).
        n: columns of op(b).
        k: the summed dimension.
        batch: independent products in the launch.
        dtype: name of the inputs' dtype.
        out_dtype: name of the output's dtype.
        a_major: the dimension of op(a) with stride 1: `k`, `m`, or `any` for neither.
        b_major: the same for op(b): `n`, `k` or `any`.
        precision: how float32 and float8 inputs are multiplied; `ieee` for all other dtypes.
        is_aligned_in: whether both inputs can be read in 16-byte pieces: rows start at multiples of 16 bytes and are
            whole multiples long.
        is_aligned_out: whether the output's rows start at multiples of 16 bytes and their elements follow one another.
        is_padded_a: whether a descriptor can describe `a`: rows start at multiples of 16 bytes.
        is_padded_b: the same for `b`.
        is_copyable: whether the inputs can be copied into other rows first: nothing is empty, one batch dimension at most.
        is_boxed_out: whether a descriptor can store the output: its rows are also whole multiples long, since what
            follows them is not ours.
    """

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    out_dtype: str
    a_major: str = "k"
    b_major: str = "n"
    precision: str = "ieee"
    is_aligned_in: bool = True
    is_aligned_out: bool = True
    is_padded_a: bool = True
    is_padded_b: bool = True
    is_copyable: bool = True
    is_boxed_out: bool = True

    @property
    def is_padded_in(self) -> bool:
        """Whether descriptors can describe both inputs."""
        return self.is_padded_a and self.is_padded_b

    @property
    def min_bytes(self) -> int:
        """Each operand read once and the output written once."""
        read = (self.m * self.k + self.k * self.n) * ITEM_BYTES[self.dtype]
        return self.batch * (read + self.m * self.n * ITEM_BYTES[self.out_dtype])


@dataclass(frozen=True)
class EpilogueSpec:
    """Scales, bias and activation behind the product. All but whether there are any is passed to the kernels at run time.

    Attributes:
        bias_dtype: name of the bias' dtype, empty without a bias.
        a_scale: `none`, `one`, or `each` row.
        b_scale: `none`, `one`, or `each` column.
        activation: one of `ACTIVATIONS`.
    """

    bias_dtype: str = ""
    a_scale: str = "none"
    b_scale: str = "none"
    activation: str = "none"

    @property
    def is_plain(self) -> bool:
        """Whether nothing follows."""
        return self == EpilogueSpec()


@dataclass(frozen=True)
class Specialization:
    """Everything beside its configuration that a binary depends on. `members.members` lists them.

    Attributes:
        kernel: `pointer`, `tma`, `wgmma`, `fma`, `vector` or `element`.
        dtype: of the inputs.
        precision: how float32 inputs are multiplied.
        a_major: as in `Problem`; `any` for both operands when it is for one.
        b_major: as in `Problem`.
        store: `tma` (through a descriptor), `vec16` (rows start at multiples of 16 bytes; not `wgmma`) or `scalar`.
        out_dtype: of the output (`tma`, `wgmma`); empty where it is passed at run time (the others).
        is_batched: whether descriptors have a batch dimension: those of `tma` always, those of `wgmma` for batches.
        splits: programs that share a tile, for `wgmma`; 1 for the others, which are told at run time.
        is_plain: whether nothing follows the product (a constant only where the store is `tma` and K not shared).
    """

    kernel: str
    dtype: str
    precision: str
    a_major: str
    b_major: str
    store: str
    out_dtype: str = ""
    is_batched: bool = False
    splits: int = 1
    is_plain: bool = False


@dataclass(frozen=True)
class Config:
    """Kernel, block sizes and compiler options of one launch.

    Attributes:
        kernel: `pointer` (anything), `tma` (descriptors; rows start at multiples of 16 bytes), `wgmma` (the same on Hopper,
            with loads, products and stores on warps of their own), `fma` (float32 on NVIDIA's scalar units; rows or columns
            start at multiples of 16 bytes), `vector` (up to four rows, without the matrix unit) or `element` (small products
            and vectors, any strides; without the matrix unit).
        block_m: rows of a tile.
        block_n: columns of a tile; of `element`, squares of `block_m` rows and columns, of any products.
        block_k: length of K in one step.
        group_m: rows of tiles walked together.
        split_k: programs that share a tile; those of `wgmma` are a cluster.
        num_warps: warps of one program; of `wgmma`, those that multiply, four for each 64 rows or (swapped) columns.
        num_stages: steps of operands in flight.
        is_persistent: as many programs as run at a time, each taking tile after tile (`tma`; always `wgmma`, unless split).
        is_swapped: compute transposed tiles (`tma`, `wgmma`).
        halves: parts in which a tile is stored (`tma`, `wgmma`): 1 or 2.
        waves_per_eu: occupancy hint on AMD.
        is_copied: operands that the kernel cannot read, or reads slowly, are first copied into rows that it reads fast.
        shares: operand, `a` or `b`, whose boxes programs of a cluster load in turns, for all (`wgmma`), and how many programs
            where they are not two: `a`, `a4`; empty for none.
        lanes: neighbouring threads that share sums (`element`).
    """

    kernel: str
    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 3
    is_persistent: bool = False
    is_swapped: bool = False
    halves: int = 1
    waves_per_eu: int = 0
    is_copied: bool = False
    shares: str = ""
    lanes: int = 1

    @property
    def sharers(self) -> int:
        """Programs that share an operand; 1 for none."""
        return int(self.shares[1:] or 2) if self.shares else 1

    def sharers_of(self, operand: str) -> int:
        """Programs that share `operand`, which is `a` or `b`; 1 for none."""
        return self.sharers if self.shares.startswith(operand) else 1

    def tiles(self, problem: Problem) -> int:
        """Output tiles of all batch entries. Programs that share have one each, so the last may be there more than once."""
        if self.kernel == "element":
            squares = cdiv(problem.m, self.block_m) * cdiv(problem.n, self.block_m) * problem.batch
            return cdiv(squares, self.block_n)
        groups = cdiv(cdiv(problem.m, self.block_m), self.sharers_of("b"))
        groups *= cdiv(cdiv(problem.n, self.block_n), self.sharers_of("a"))
        return groups * self.sharers * problem.batch


# Not a kernel of ours: PyTorch's product, which the device's vendor library computes. Chosen only where a race has learned it.
VENDOR = Config("vendor", 0, 0, 0)


def boxes_of(length: int) -> tuple[int, int]:
    """Rows of the first and of the second box that `length` rows of the right operand are loaded in; the second may be 0.

    `kernels.matmul.hopper` says which operand is the right one. `length` is a multiple of 8.
    """
    is_one = length <= _LARGEST_BOX or place_of(length) == length
    return (length, 0) if is_one else (_LARGEST_BOX, length - _LARGEST_BOX)


def place_of(rows: int) -> int:
    """Rows that a box of `rows` has room for in shared memory: a power of two."""
    return 1 << (rows - 1).bit_length() if rows else 0


def right_of(config: Config) -> int:
    """Rows of the right operand of a tile of the kernel for Hopper."""
    return config.block_m if config.is_swapped else config.block_n


def is_narrow(config: Config) -> bool:
    """Whether a box of the right operand is smaller than its place; products then compute fewer columns than they could."""
    return config.kernel == "wgmma" and any(place_of(rows) != rows for rows in boxes_of(right_of(config)))


def pitch_of(config: Config, item_bytes: int) -> int:
    """Rows from one step's first box of the right operand to the next one's in shared memory (kernel for Hopper).

    A box whose rows are one line each keeps only these.
    """
    main, _ = boxes_of(right_of(config))
    return main if config.block_k * item_bytes == _LINE_OF_BOX else place_of(main)


def programs_on(config: Config, item_bytes: int, out_bytes: int, shared_bytes: int) -> int:
    """Programs of the kernel for Hopper that share a multiprocessor: as many as its shared memory has room for, up to three.

    Args:
        config: Configuration.
        item_bytes: Bytes of an input's element.
        out_bytes: Bytes of an output's element.
        shared_bytes: What a program may have if it is alone.
    """
    main, tail = map(place_of, boxes_of(right_of(config)))
    rows = CONSUMER_ROWS * config.num_warps // CONSUMER_WARPS
    pitch = pitch_of(config, item_bytes)
    loaded = (config.num_stages * (rows + pitch + tail) + main - pitch) * config.block_k * item_bytes
    # A tail may be stored from a place of its own.
    needed = _BARRIER_BYTES + loaded + rows * (main // config.halves + tail) * out_bytes
    most = _MOST_PROGRAMS[config.num_warps // CONSUMER_WARPS]
    return next(count for count in range(most, 0, -1) if count == 1 or needed <= _part_of(shared_bytes, count))


def _part_of(shared_bytes: int, programs: int) -> int:
    """Returns the bytes of shared memory for each of `programs` on a multiprocessor."""
    return (shared_bytes + _KEPT_BYTES) // programs - _KEPT_BYTES


def stages_beside(config: Config, item_bytes: int, out_bytes: int, splits: int, shared_bytes: int) -> int:
    """Steps of operands of the kernel for Hopper that fit beside the sums of so many programs but one.

    As many programs run on a multiprocessor as if K were not shared.

    Args:
        config: Configuration, without a second box.
        item_bytes: Bytes of an input's element.
        out_bytes: Bytes of an output's element.
        splits: Programs that share a tile.
        shared_bytes: What a program may have if it is alone.
    """
    rows, columns = CONSUMER_ROWS * config.num_warps // CONSUMER_WARPS, place_of(right_of(config))
    pitch = pitch_of(config, item_bytes)
    kept = rows * columns * (4 * (splits - 1) + out_bytes // config.halves)
    kept += (columns - pitch) * config.block_k * item_bytes
    room = _part_of(shared_bytes, programs_on(config, item_bytes, out_bytes, shared_bytes)) - _BARRIER_BYTES - kept
    return min(config.num_stages, room // ((rows + pitch) * config.block_k * item_bytes))


def has_vendor(problem: Problem, *, is_plain: bool) -> bool:
    """Whether the vendor library computes a product as accurately: one product, nothing behind it, no conversion."""
    is_known = problem.dtype in ("float16", "bfloat16", "float32") and problem.precision != "tf32x3"
    return is_plain and problem.batch == 1 and problem.dtype == problem.out_dtype and is_known


def cdiv(amount: int, size: int) -> int:
    """`amount / size`, rounded up."""
    return -(-amount // size)


def precisions_of(dtype: str) -> tuple[str, ...]:
    """The precisions that products of `dtype` have binaries for."""
    if dtype == "float32":
        return PRECISIONS[:3]
    return ("ieee", "fast") if dtype.startswith("float8") else ("ieee",)


def known_precision(dtype: str, precision: str) -> str:
    """`precision` where products of `dtype` have it, else `ieee`."""
    return precision if precision in precisions_of(dtype) else "ieee"


def resolve_precision(precision: str, target: Target) -> str:
    """The precision that `target` multiplies float32 with when `precision` is requested: never a coarser one."""
    if target.backend == "hip" and (precision == "tf32x3" or target.arch != "gfx942"):
        return "ieee"
    return precision


def resolved(problem: Problem, target: Target) -> Problem:
    """`problem` as `target` multiplies it."""
    precision = resolve_precision(problem.precision, target) if problem.dtype == "float32" else problem.precision
    return problem if precision == problem.precision else replace(problem, precision=precision)


def has_limbs(problem: Problem, config: Config) -> bool:
    """Whether operands are copied in limbs, and those multiplied as tf32."""
    return config.is_copied and takes_limbs(problem, config.kernel)


def takes_limbs(problem: Problem, kernel: str) -> bool:
    """Whether `kernel` multiplies limbs of what `problem` has."""
    return problem.precision == "tf32x3" and kernel in LIMB_KERNELS


def limb_k(k: int) -> int:
    """Returns how long K is in the copy of one limb: whole pieces of 16 bytes."""
    return cdiv(k, 4) * 4


def copied_operands(problem: Problem, kernel: str) -> tuple[bool, bool]:
    """Whether `a` and `b` are copied where operands are: those that `kernel` cannot read, or reads slowly."""
    if takes_limbs(problem, kernel):
        return True, True
    a_major, b_major = _rows_for(problem, kernel)
    is_a, is_b = a_major != problem.a_major, b_major != problem.b_major
    return is_a or not problem.is_padded_a, is_b or not problem.is_padded_b


def as_read(problem: Problem, config: Config) -> Problem:
    """`problem` as the kernel of `config` meets it: after the copies, where there are any."""
    if problem.precision == "tf32x3" and not has_limbs(problem, config):
        problem = _as_it_is(problem)
    return _as_copied(problem, config.kernel) if config.is_copied else problem


@functools.lru_cache(maxsize=64)
def _as_it_is(problem: Problem) -> Problem:
    return replace(problem, precision="ieee")


@functools.lru_cache(maxsize=64)
def _as_copied(problem: Problem, kernel: str) -> Problem:
    """Looked up, since every candidate of a choice asks."""
    if takes_limbs(problem, kernel):
        k = LIMBS_OF_K * limb_k(problem.k)
        both = replace(problem, k=k, a_major="k", b_major="k", is_aligned_in=True)
        return replace(both, is_padded_a=True, is_padded_b=True)
    a_major, b_major = _rows_for(problem, kernel)
    unit = 16 // ITEM_BYTES[problem.dtype]
    lengths = (problem.k if a_major == "k" else problem.m, problem.n if b_major == "n" else problem.k)
    return replace(
        problem,
        a_major=a_major,
        b_major=b_major,
        is_aligned_in=all(length % unit == 0 for length in lengths),
        is_padded_a=True,
        is_padded_b=True,
    )


def _rows_for(problem: Problem, kernel: str) -> tuple[str, str]:
    """The contiguous dimensions of both operands that `kernel` reads fast."""
    # An `a` that is copied anyway, or with output rows that start anywhere, gets the layout that most tiles are built for.
    is_as_it_is = problem.is_padded_a and (problem.is_aligned_out or kernel == "pointer")
    a_major = problem.a_major if is_as_it_is else "k"
    b_major = "n" if problem.b_major == "any" else problem.b_major
    if kernel == "fma":
        # Rows of either pass through registers, and are turned there for each tile anew.
        return "m", "n"
    if kernel == "pointer":
        # Its scalar units read columns of `b` from shared memory: along K each would come from the same bank.
        return a_major, "n"
    return (a_major, b_major) if ITEM_BYTES[problem.dtype] == 2 else ("k", "k")


def is_read_in_pieces(problem: Problem) -> bool:
    """Whether the pointer kernel reads and writes `problem` 16 bytes at a time."""
    return problem.is_aligned_in and problem.is_aligned_out and "any" not in (problem.a_major, problem.b_major)

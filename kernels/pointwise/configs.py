"""Blocks of the pointwise kernel. Pure: no torch, no Triton, no device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tilewire.kernels.runtime import elementwise
from tilewire.kernels.runtime.elementwise import ALL_ANY, ALL_UNIT, REPEATS, Config, Specialization
from tilewire.kernels.runtime.kinds import FLOATS, ITEM_BYTES
from tilewire.kernels.runtime.targets import Target

# Functions by the numbers that the kernel is given.
UNARY = {
    "relu": 1,
    "gelu": 3,
    "silu": 4,
    "sigmoid": 5,
    "tanh": 6,
    "exp": 7,
    "log": 8,
    "sqrt": 9,
    "rsqrt": 10,
    "abs": 11,
    "neg": 12,
}
BINARY = {"mul": 0, "sub": 1, "div": 2, "maximum": 3, "minimum": 4}


class Problem(elementwise.Problem):
    """One pointwise function as the choice of blocks sees it."""

    @property
    def specialization(self) -> Specialization:
        """The specialization whose binaries compute this: the rarer a pattern, the fewer binaries are made for it."""
        is_typed = self.dtype == self.out_dtype
        is_flat = self.rows == 1 and self.inner == ALL_UNIT
        is_common = is_typed and (is_flat or (self.is_aligned and self.inner in _COMMON))
        if not is_common:
            return Specialization(self.dtype, is_typed, False, ALL_ANY, 3, self.is_binary)
        return Specialization(self.dtype, True, self.is_aligned, self.inner, 0 if is_flat else 3, self.is_binary)


_COMMON = (ALL_UNIT, *REPEATS)
# Lengths of a block, and from where on rows take the longer one (H200, `tilewire bench ops --random`).
_LENGTHS, _LONG = (64, 256), 512
# Up to so many elements a multiprocessor each thread moves 16 bytes, above it 32 (H200, `tilewire bench ops`).
_FEW_PER_SM = 8192


def choose(problem: Problem, target: Target) -> Config:
    """The blocks for `problem` on `target`: with its specialization, one of `enumerate_configs`."""
    configs = configs_for(problem.specialization, target)
    if problem.specialization.outer_rank == 0:
        return configs[0] if problem.n <= _FEW_PER_SM * target.num_sms else configs[-1]
    # Element by element, a block of many short rows is a long chain for each thread.
    longest = _LONG if problem.specialization.is_aligned else _LENGTHS[0] + 1
    return configs[0] if problem.n < longest else configs[-1]


def configs_for(specialization: Specialization, target: Target) -> tuple[Config, ...]:
    """Blocks by rising length of a row."""
    if target.backend == "interpreter":
        return (Config(1, 64, 4),) if specialization.outer_rank == 0 else (Config(4, 16, 4), Config(1, 64, 4))
    if specialization.outer_rank == 0:
        elements = 2048 // ITEM_BYTES[specialization.dtype]
        return (Config(1, elements, 4), Config(1, 2 * elements, 4))
    return tuple(Config(1024 // length, length, 4) for length in _LENGTHS)


def enumerate_configs(target: Target) -> Iterator[tuple[Specialization, Config]]:
    """Every specialization and blocks that `choose` can return on `target`."""
    for dtype, is_binary in itertools.product(FLOATS, (True, False)):
        patterns = [(True, is_aligned, ALL_UNIT, 0) for is_aligned in (True, False)]
        patterns += [(True, True, inner, 3) for inner in (_COMMON if is_binary else _COMMON[:1])]
        patterns += [(is_typed, False, ALL_ANY, 3) for is_typed in (True, False)]
        for pattern in patterns:
            specialization = Specialization(dtype, *pattern, is_binary)
            yield from ((specialization, config) for config in configs_for(specialization, target))

"""Compiling candidates, and what the compiler made of them: shared memory, registers, spills. Needs no device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import triton

from tilewire.kernels.add.configs import Config as AddConfig
from tilewire.kernels.add.configs import Family as AddFamily
from tilewire.kernels.add.variants import build as build_add
from tilewire.kernels.autotune.crew import Crew, Failure
from tilewire.kernels.matmul.configs import Config as MatmulConfig
from tilewire.kernels.matmul.configs import Family
from tilewire.kernels.matmul.variants import build as build_matmul
from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import KIB, Target
from tilewire.kernels.softmax.configs import Config as SoftmaxConfig
from tilewire.kernels.softmax.configs import Problem as SoftmaxProblem
from tilewire.kernels.softmax.variants import KERNELS
from tilewire.kernels.softmax.variants import build as build_softmax

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_THREADS_OF_SM = 2048
_REGISTERS_OF_SM = 65536
# Shared memory that the driver keeps of each program's.
_RESERVED_BYTES = KIB


@dataclass(frozen=True)
class Recipe:
    """What names the binaries of a candidate: `family` is the op's own idea of a family."""

    family: Family | SoftmaxProblem | AddFamily
    config: MatmulConfig | SoftmaxConfig | AddConfig
    target: Target

    def variants(self) -> list[Variant]:
        """The binaries, in the order of launch."""
        if isinstance(self.family, Family):
            assert isinstance(self.config, MatmulConfig), "This is a bug."
            return [build_matmul(self.family, self.config, self.target)]
        if isinstance(self.family, SoftmaxProblem):
            assert isinstance(self.config, SoftmaxConfig), "This is a bug."
            kernels = KERNELS[self.config.kernel]
            return [build_softmax(kernel, self.family, self.config, self.target) for kernel in kernels]
        assert isinstance(self.config, AddConfig), "This is a bug."
        return [build_add(self.family, self.config, self.target)]

    def key(self) -> str:
        """The candidate in words, the same in every process."""
        return f"{self.family} {self.config}"


@dataclass(frozen=True)
class Facts:
    """What a candidate's binaries need, the greatest of each.

    Attributes:
        shared_bytes: of one program.
        registers: of one thread.
        spilled_bytes: of one thread's registers that lie in memory.
        num_threads: of one program.
    """

    shared_bytes: int
    registers: int
    spilled_bytes: int
    num_threads: int

    def programs_per_sm(self, target: Target) -> int:
        """How many programs run on one multiprocessor of `target` at a time."""
        by_threads = _THREADS_OF_SM // self.num_threads
        by_shared = (target.shared_bytes + _RESERVED_BYTES) // (self.shared_bytes + _RESERVED_BYTES)
        by_registers = _REGISTERS_OF_SM // (max(1, -(-self.registers // 8) * 8) * self.num_threads)
        return max(1, min(by_threads, by_shared, by_registers))

    def objection(self, target: Target) -> str:
        """Why these binaries are not worth launching; empty when they are."""
        if self.shared_bytes > target.shared_bytes:
            return f"{self.shared_bytes} bytes of shared memory"
        return f"{self.spilled_bytes} bytes of registers spilled" if self.spilled_bytes else ""


Outcome = Facts | Failure


class Compiler:
    """Compiles candidates in processes of their own. Use as a context manager.

    Args:
        num_workers: processes; 0 for one on each core.
        timeout_s: how long one candidate may take.
    """

    def __init__(self, *, num_workers: int = 0, timeout_s: float = 120.0) -> None:
        self._crew: Crew[Recipe, Facts] = Crew(facts_of, num_workers=num_workers, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._crew.__exit__()

    def compile(
        self, recipes: Iterable[Recipe], on_done: Callable[[Recipe, Outcome], None], is_over: Callable[[], bool]
    ) -> None:
        """Compile `recipes` into Triton's disk cache; `on_done` hears of each, until `is_over`."""
        listed = list(recipes)
        self._crew.run(listed, lambda number, outcome: on_done(listed[number], outcome), is_over)


def facts_of(recipe: Recipe) -> Facts:
    """Compile the binaries of `recipe`; what they need."""
    compiled = [variant.compile(recipe.target) for variant in recipe.variants()]
    every = [_facts(each, recipe.target) for each in compiled]
    return Facts(**{name: max(getattr(facts, name) for facts in every) for name in asdict(every[0])})


def _facts(compiled: Any, target: Target) -> Facts:
    metadata = compiled.metadata
    registers, spilled = (_usage_amd if target.backend == "hip" else _usage_cuda)(compiled.asm)
    return Facts(int(metadata.shared), registers, spilled, int(metadata.num_warps) * target.warp_size)


def _usage_cuda(asm: Any) -> tuple[int, int]:
    """Registers and bytes of stack by cuobjdump's report; nothing where Triton comes without that tool."""
    if not _CUOBJDUMP.is_file():
        return 0, 0
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        done = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True)  # noqa: S603
    report = done.stdout + done.stderr
    registers, stacks = (list(map(int, re.findall(rf"{name}:(\d+)", report))) for name in ("REG", "STACK"))
    return max(registers, default=0), sum(stacks)


def _usage_amd(asm: Any) -> tuple[int, int]:
    """Vector registers, and spilled ones with scratch, from the notes of the object file."""
    notes = asm["hsaco"]
    spilled = 4 * _note(notes, b".vgpr_spill_count") + _note(notes, b".private_segment_fixed_size")
    return _note(notes, b".vgpr_count"), spilled


def _note(notes: bytes, name: bytes) -> int:
    """The whole number that follows `name` in MessagePack; 0 where there is none."""
    start = notes.find(name)
    if start < 0:
        return 0
    kind, rest = notes[start + len(name)], notes[start + len(name) + 1 :]
    if kind < 0x80:
        return kind
    length = {0xCC: 1, 0xCD: 2, 0xCE: 4}.get(kind, 0)
    return int.from_bytes(rest[:length], "big")

"""Compiling candidates, and what the compiler made of them: shared memory, registers, spills. Needs no device."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import KIB, Target

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_THREADS_OF_SM = 2048
_REGISTERS_OF_SM = 65536
# Shared memory that the driver keeps of each program's.
_RESERVED_BYTES = KIB


@dataclass(frozen=True)
class Facts:
    """Resources that a candidate's binaries need, the largest of each.

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
        """Returns the number of programs that run on one multiprocessor of `target` at a time."""
        by_threads = _THREADS_OF_SM // self.num_threads
        by_shared = (target.shared_bytes + _RESERVED_BYTES) // (self.shared_bytes + _RESERVED_BYTES)
        by_registers = _REGISTERS_OF_SM // (max(1, -(-self.registers // 8) * 8) * self.num_threads)
        return max(1, min(by_threads, by_shared, by_registers))

    def objection(self, target: Target) -> str:
        """Why these binaries are not worth launching; empty when they are."""
        if self.shared_bytes > target.shared_bytes:
            return f"{self.shared_bytes} bytes of shared memory"
        return f"{self.spilled_bytes} bytes of registers spilled" if self.spilled_bytes else ""


def facts_of_variants(variants: Sequence[Variant], target: Target) -> Facts:
    """Compile `variants`; what they need, the greatest of each."""
    every = [_facts(variant.compile(target), target) for variant in variants]
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

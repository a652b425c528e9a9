# mypy: ignore-errors
"""Programs that hold a row together and tell each other of their parts. Jit functions, and how they are launched.

The members of a group must all be running at the same time, so the launch is a cooperative one: the driver starts all
programs or none. Where there are no such launches, in the interpreter too, groups have one member.
"""

from typing import Any

import triton
import triton.language as tl

from tilewire.kernels.runtime.targets import Target

_REGISTERS = 65536


@triton.jit
def exchange(partial_ptr, count_ptr, member, group_size, turn, first, second, nothing, MAX_GROUP: tl.constexpr):
    """The two floats of every member of a group, each (MAX_GROUP,), `nothing` and 0 behind the last.

    `partial_ptr` is the group's, (2, group_size, 2) float32. Two slots are used in turn: a member that is one turn ahead
    must not overwrite a slot that others still read. `count_ptr` is its int32 of arrivals, zero before and after the launch.
    """
    slot = partial_ptr + (turn % 2) * (2 * group_size)
    tl.store(slot + member * 2, first)
    tl.store(slot + member * 2 + 1, second)
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < (turn + 1) * group_size:
        arrived = tl.atomic_add(count_ptr, 0, sem="acquire", scope="gpu")
    everyone = tl.arange(0, MAX_GROUP)
    present = everyone < group_size
    firsts = tl.load(slot + everyone * 2, mask=present, other=nothing, cache_modifier=".cg")
    seconds = tl.load(slot + everyone * 2 + 1, mask=present, other=0.0, cache_modifier=".cg")
    return firsts, seconds


@triton.jit
def leave(count_ptr, group_size, turns):
    """After `turns` exchanges: the last member to leave puts the counter back."""
    left = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") + 1
    if left == (turns + 1) * group_size:
        tl.store(count_ptr, 0)


def can_wait(target: Target) -> bool:
    """Whether programs can wait for each other: the driver can be asked to run all of a launch at the same time."""
    return target.backend == "cuda"


def options_of(num_warps: int, programs_per_sm: int, target: Target) -> dict[str, Any]:
    """Options of the compiler for programs that wait for each other, so many on each multiprocessor."""
    if not can_wait(target):
        return {}
    # A thread gets eight registers at a time.
    registers = _REGISTERS // (32 * num_warps * programs_per_sm) // 8 * 8
    return {"launch_cooperative_grid": True, "maxnreg": min(255, registers)}

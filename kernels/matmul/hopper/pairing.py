# mypy: ignore-errors
"""Pairs of programs that load an operand together: each loads half of a box, for both.

Two multiprocessors read from L2 what one would. The compiler has no loads for several programs where a kernel is written
for one. So a kernel says by `begin_pair`, `load_for_pair` and `load_for_one` what is for both, and `pair` changes the text
of the program (PTX), between the compiler and the assembler:

- Programs are launched in clusters of two.
- Loads between `load_for_pair` and `load_for_one` write to the same place of both programs, and count for the barriers of both.
- Consumers tell both programs that a place is empty.
- Each waits at its start until the other has its barriers. Warps that wait for work only say that they are there: they
  give registers back behind that place, and the others wait for these.

The loading warp must not end before all its places are empty for the last time: the other program would tell one that is gone.

Source: PTX ISA, cp.async.bulk.tensor (multicast::cluster), mapa, mbarrier.arrive, barrier.cluster.
"""

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MARK, _ARRIVES = "// pair ", "mbarrier.arrive"
_LOAD = re.compile(
    r"(.*cp\.async\.bulk\.tensor\.\dd\.shared::)(?:cta|cluster)(\.global\.mbarrier::complete_tx::bytes)(.*\])(;.*)"
)
_ARRIVE = re.compile(r"\s*(@!?%p\d+)?\s*mbarrier\.arrive\.shared(?:::cta)?\.b64\s+_,\s*\[(%r\d+)\];")
_BRANCH, _JUMP = re.compile(r"\s*@%p\d+\s+bra\s"), re.compile(r"\s*bra\.uni\s")


@gluon.jit
def begin_pair():
    """Wait until the other program has initialised its barriers, too."""
    gl.inline_asm_elementwise("// pair begin $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_for_pair():
    """Loads from here on are for both programs."""
    gl.inline_asm_elementwise("// pair both $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_for_one():
    """Loads from here on are for this program alone."""
    gl.inline_asm_elementwise("// pair one $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def pair(ptx: str) -> str:
    """The program with loads for pairs, where it has any.

    Raises:
        RuntimeError: The compiler writes what is to be changed in another way. As it is, the program would never end.
    """
    if _MARK not in ptx:
        return ptx
    lines, num_left, is_for_both, is_behind_branch = [], 0, False, False
    changed = dict.fromkeys(("size", "entry", "begin", "load", "arrival"), 0)

    def change(what, *text):
        changed[what] += 1
        lines.extend(text)

    for line in ptx.split("\n"):
        mark = line.partition(_MARK)[2].partition(" ")[0]
        if mark in ("both", "one"):
            is_for_both = mark == "both"
        elif mark:
            change("begin", "\tfence.mbarrier_init.release.cluster;", "\tbarrier.cluster.arrive.release;")
            lines.append("\tbarrier.cluster.wait.acquire;")
        elif line.startswith(".reqntid"):
            change("size", line, ".reqnctapercluster 2, 1, 1")
        elif not changed["entry"] and is_behind_branch and _JUMP.match(line):
            # The first branch is where warps that wait for work part from those that begin.
            change("entry", "\tbarrier.cluster.arrive.relaxed;", line)
        elif is_for_both and (found := _LOAD.match(line)):
            begin, kind, operands, end = found.groups()
            load = f"{begin}cluster{kind}.multicast::cluster{operands}, both{end}"
            change("load", "\t{", "\t.reg .b16 both;", "\tmov.b16 both, 3;", load, "\t}")
        elif found := _ARRIVE.match(line):
            change("arrival", *_arrivals(*found.groups()))
        else:
            # What should have been changed, and is written in another way.
            num_left += (is_for_both and "bulk.tensor" in line) or (_ARRIVES in line and "expect_tx" not in line)
            lines.append(line)
        is_behind_branch = _BRANCH.match(line) is not None
    if num_left or not all(changed.values()) or any(changed[once] != 1 for once in ("size", "entry", "begin")):
        raise RuntimeError(f"this compiler writes programs in a way in which pairs of them are not known: {changed}")
    return "\n".join(lines)


def _arrivals(predicate, address):
    """Arrivals at the barrier of this address of both programs."""
    text = ["\t{", "\t.reg .b32 there;"]
    for program in (0, 1):
        text.append(f"\tmapa.shared::cluster.u32 there, {address}, {program};")
        text.append(f"\t{predicate or ''} mbarrier.arrive.shared::cluster.b64 _, [there];")
    return [*text, "\t}"]

# mypy: ignore-errors
"""Programs of a cluster that load an operand together, or share the K of a tile.

Programs that load together read from L2 what one would: they load boxes in turns, each for all. Programs that share K
multiply some of its steps each, and send their sums to the one that stores them, from shared memory to shared memory.

The compiler has neither where a kernel is written for one program. So a kernel says what is for others, by the functions
below, and `join` changes the text of the program (PTX), between the compiler and the assembler:

- Programs are launched in clusters, as `begin_cluster` says. Each tells the others at its start that its barriers are there.
  Warps that wait for work only say that they are there: they give registers back behind that place, and the others wait for
  these.
- Loads between `load_for_all` and `load_for_one` write to the same place of all programs, and count for the barriers of all.
- `arrive_at_both` arrives at the barrier of another program, too: the one that loads for all must know that a place is empty.
- `send` copies to another program, and counts for its barrier; `tell_others` arrives at the barriers of all others.

A program must not end while another one may still write to it, or tell it something.

Source: PTX ISA, cp.async.bulk.tensor (multicast::cluster), cp.async.bulk (shared::cluster), mapa, mbarrier.arrive,
barrier.cluster.
"""

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

_MARK = "// cluster "
_LOAD = re.compile(
    r"(.*cp\.async\.bulk\.tensor\.\dd\.shared::)(?:cta|cluster)(\.global\.mbarrier::complete_tx::bytes)(.*\])(;.*)"
)
_ARRIVE = re.compile(r"\s*(@!?%p\d+)?\s*mbarrier\.arrive\.shared(?:::cta)?\.b64\s+_,\s*\[(%r\d+)\];")
_BRANCH, _JUMP = re.compile(r"\s*@%p\d+\s+bra\s"), re.compile(r"\s*bra\.uni\s")
_BEGIN = re.compile(_MARK + r"begin (\d+) (\d+) ")
_COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


@gluon.jit
def begin_cluster(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Begin a cluster of so many programs along the grid's first and second axis, when barriers are initialised.

    Programs along the first axis wait for each other here; those along the second before they send.
    """
    TEXT: gl.constexpr = f"// cluster begin {ROWS} {COLUMNS} $0"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_for_all():
    """Loads from here on are for all programs of the cluster."""
    gl.inline_asm_elementwise("// cluster all $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_for_one():
    """Loads from here on are for this program alone."""
    gl.inline_asm_elementwise("// cluster one $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive_at_both(bar, program, pred):
    """Arrive at `bar` if `pred`, and at that of `program` of the cluster, unless that is negative."""
    gl.inline_asm_elementwise("// cluster arrive $1 $0", "=r,r", [program], dtype=gl.int32, is_pure=False, pack=1)
    mbarrier.arrive(bar, pred=pred)


@gluon.jit
def send(place, bar, NUM_BYTES: gl.constexpr, PROGRAM: gl.constexpr):
    """Start copying `place` to the same place of program PROGRAM of the cluster, and count the bytes for its `bar`."""
    TEXT: gl.constexpr = f"// cluster send {PROGRAM} {NUM_BYTES} $0"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    # What says where the two are, and is no arrival in the end.
    mbarrier.arrive(place._reinterpret(gl.int64, [1], mbarrier.MBarrierLayout()))
    mbarrier.arrive(bar)


@gluon.jit
def tell_others(bar, PROGRAM: gl.constexpr):
    """Arrive at `bar` of all programs but PROGRAM, which is this one."""
    TEXT: gl.constexpr = f"// cluster tell {PROGRAM} $0"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    mbarrier.arrive(bar)


def join(ptx: str) -> str:
    """The program with what is for others of its cluster, where it has any.

    Raises:
        RuntimeError: The compiler writes what is to be changed in another way. As it is, the program would never end.
    """
    begin = _BEGIN.search(ptx)
    return ptx if begin is None else _Joined(int(begin[1]), int(begin[2])).text_of(ptx)


class _Joined:
    """Changes of one program in a cluster of so many programs along the grid's axes."""

    def __init__(self, rows, columns):
        self._size = (rows, columns)
        self._is_sharing = rows > 1
        names = ("load", "arrival") if self._is_sharing else ("send", "tell")
        self._changed = dict.fromkeys(("size", "entry", "begin", *names), 0)
        # What the last mark says of the lines that follow it, and the arrivals that have followed a `send`.
        self._mark, self._values, self._places = "", [], []
        self._num_left = 0

    def text_of(self, ptx):
        lines, is_behind_branch = [], False
        for line in ptx.split("\n"):
            lines.extend(self._lines_of(line, is_behind_branch=is_behind_branch))
            is_behind_branch = _BRANCH.match(line) is not None
        changed = self._changed
        if (
            self._num_left + self._is_waiting
            or not all(changed.values())
            or any(changed[once] != 1 for once in ("size", "entry", "begin"))
        ):
            raise RuntimeError(f"this compiler writes programs in a way in which clusters are not known: {changed}")
        return "\n".join(lines)

    def _lines_of(self, line, *, is_behind_branch):
        if _MARK in line:
            self._num_left += self._is_waiting
            self._mark, *self._values = line.partition(_MARK)[2].split()
            return self._begun() if self._mark == "begin" else []
        if line.startswith(".reqntid"):
            return self._change("size", line, ".reqnctapercluster {}, {}, 1".format(*self._size))
        if is_behind_branch and not self._changed["entry"] and _JUMP.match(line):
            # The first branch is where warps that wait for work part from those that begin.
            return self._change("entry", "\tbarrier.cluster.arrive.relaxed;", line)
        if self._mark == "all" and (found := _LOAD.match(line)):
            begin, kind, operands, end = found.groups()
            load = f"{begin}cluster{kind}.multicast::cluster{operands}, all{end}"
            every = (1 << self._size[0]) - 1
            return self._change("load", "\t{", "\t.reg .b16 all;", f"\tmov.b16 all, {every};", load, "\t}")
        if found := _ARRIVE.match(line):
            return self._arrived(found[1] or "", found[2], line)
        # What should have been changed, and is written in another way.
        is_arrival = self._is_waiting and "mbarrier.arrive" in line and "expect_tx" not in line
        self._num_left += is_arrival or (self._mark == "all" and "bulk.tensor" in line)
        return [line]

    @property
    def _is_waiting(self):
        """Whether an arrival that a mark is about is still to follow."""
        return self._mark in ("arrive", "send", "tell")

    def _change(self, what, *lines):
        self._changed[what] += 1
        return lines

    def _begun(self):
        wait = ["\tbarrier.cluster.wait.acquire;"] if self._is_sharing else []
        return self._change(
            "begin", "\tfence.mbarrier_init.release.cluster;", "\tbarrier.cluster.arrive.release;", *wait
        )

    def _arrived(self, predicate, address, line):
        if self._mark == "arrive":
            self._mark = ""
            return self._change("arrival", line, *_arrival(predicate, address, self._values[0]))
        if self._mark == "tell":
            self._mark = ""
            others = [program for program in range(self._size[1]) if program != int(self._values[0])]
            return self._change("tell", *_arrivals(predicate, address, others))
        if self._mark != "send":
            return [line]
        self._places.append(address)
        if len(self._places) < 2:
            return []
        (place, bar), self._places, self._mark = self._places, [], ""
        program, num_bytes = self._values[:2]
        return self._change(
            "send",
            "\tbarrier.cluster.wait.acquire;",
            "\t{",
            "\t.reg .b32 there, bar;",
            f"\tmapa.shared::cluster.u32 there, {place}, {program};",
            f"\tmapa.shared::cluster.u32 bar, {bar}, {program};",
            f"\t{predicate} {_COPY} [there], [{place}], {num_bytes}, [bar];",
            "\t}",
        )


def _arrivals(predicate, address, programs):
    """Arrivals at the barrier of this address of some programs."""
    text = ["\t{", "\t.reg .b32 there;"]
    for program in programs:
        text.append(f"\tmapa.shared::cluster.u32 there, {address}, {program};")
        text.append(f"\t{predicate} mbarrier.arrive.shared::cluster.b64 _, [there];")
    return [*text, "\t}"]


def _arrival(predicate, address, program):
    """An arrival at the barrier of this address of the program that a register names, unless it is negative."""
    text = ["\t{", "\t.reg .b32 there;", "\t.reg .pred is_there;", f"\tsetp.ge.s32 is_there, {program}, 0;"]
    if predicate:
        given = predicate.removeprefix("@")
        if given.startswith("!"):
            text += ["\t.reg .pred is_given;", f"\tnot.pred is_given, {given[1:]};"]
            given = "is_given"
        text.append(f"\tand.pred is_there, is_there, {given};")
    text += [
        f"\tmapa.shared::cluster.u32 there, {address}, {program};",
        "\t@is_there mbarrier.arrive.shared::cluster.b64 _, [there];",
    ]
    return [*text, "\t}"]

# mypy: ignore-errors
"""Matrix instructions of any multiple of 8 columns.

The compiler's shapes are powers of two, and so are the columns of the matrix instructions (wgmma) that it writes. The
hardware takes each multiple of 8 up to 256, in as much less time. A kernel says by `use_columns` how many columns of a
product count. `narrow` changes the instructions in the text of the program (PTX), between the compiler and the
assembler (`stages.py`). Sums of the other columns keep what they were; their registers are those past the first ones.

Where another compiler writes instructions in another way, they stay as they are: all columns are computed, of which the
last are of no product. A kernel must not use them in either case.

Source: PTX ISA, wgmma.mma_async: shapes, and the registers of the matrix D.
"""

import re

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

_MARK = "// columns "
_INSTRUCTION = re.compile(r"(\s*wgmma\.mma_async\S*\.m64n)(\d+)(k\S+\s*)\{([^}]*)\}(.*)", re.DOTALL)


@gluon.jit
def use_columns(COUNT: gl.constexpr):
    """Of products from here on, compute the first COUNT columns, until another count is given."""
    TEXT: gl.constexpr = f"// columns {COUNT} $0"
    gl.inline_asm_elementwise(TEXT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


def narrow(ptx: str) -> str:
    """The program with matrix instructions of as many columns as `use_columns` says."""
    if _MARK not in ptx:
        return ptx
    lines, columns = [], 0
    for line in ptx.split("\n"):
        _, mark, text = line.partition(_MARK)
        if mark:
            columns = int(text.split()[0])
        found = _INSTRUCTION.match(line) if columns else None
        lines.append(line if found is None else _narrowed(found, columns))
    return "\n".join(lines)


def _narrowed(found, columns):
    """An instruction with at most so many columns. Of each four a thread has two sums, in registers that follow one another."""
    begin, whole, kind, registers, rest = found.groups()
    kept = ",".join(registers.split(",")[: columns // 2])
    return f"{begin}{min(columns, int(whole))}{kind}{{{kept}}}{rest}"

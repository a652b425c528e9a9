"""Matrix instructions of fewer columns, in the text of a program. `test_compile` has what the compilers write."""

from typing import Any

from tilewire.kernels.runtime.narrowing import narrow, narrow_stages

REGISTERS = [f"%r{number}" for number in range(16)]


def product(columns, registers):
    return (
        f"\twgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        f"{{{','.join(registers)}}}, %rd7, %rd8, %p19, 1, 1, 0, 1;"
    )


def program(*lines):
    return "\n".join((".version 8.7", *lines, "\tret;"))


def test_products_compute_the_columns_that_are_named_and_leave_the_other_sums_alone():
    given = program("\t// columns 24 %r90", product(32, REGISTERS), "\tadd.s32 %r1, %r2, %r3;", product(32, REGISTERS))
    named = product(24, REGISTERS[:12])
    assert narrow(given) == program("\t// columns 24 %r90", named, "\tadd.s32 %r1, %r2, %r3;", named)


def test_a_number_holds_until_the_next():
    given = program("\t// columns 32 %r90", product(32, REGISTERS), "\t// columns 8 %r91", product(16, REGISTERS[:8]))
    assert narrow(given) == given.replace(product(16, REGISTERS[:8]), product(8, REGISTERS[:4]))


def test_other_programs_stay_as_they_are():
    given = program(product(32, REGISTERS), "\tmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1};")
    assert narrow(given) == given
    # Another assembler language for the same instruction: all columns, as the compiler wrote it.
    other = program("\t// columns 24 %r90", "\twgmma.next.m64n32k16 [%r1], %rd7;")
    assert narrow(other) == other


def test_the_hook_changes_what_comes_before_the_assembler_and_no_key():
    # As Triton 3.7 asks for what joins the keys of its cache.
    assert narrow_stages() == ("", "")
    given = program("\t// columns 24 %r90", product(32, REGISTERS))
    stages: dict[str, Any] = {"ptx": lambda source, metadata: source, "cubin": str}
    narrow_stages(None, stages, None, None, 90)
    assert stages["ptx"](given, {}) == narrow(given)
    assert stages["cubin"] is str
    # A device that is not NVIDIA's has no such stage.
    amd = {"amdgcn": str}
    narrow_stages(None, amd, None, None, None)
    assert amd == {"amdgcn": str}

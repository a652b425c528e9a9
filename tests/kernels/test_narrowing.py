"""Matrix instructions of fewer columns, in the text of a program. `test_compile` has what the compilers write."""

from typing import Any

import pytest

from tilewire.kernels.matmul.configs import Config, Specialization
from tilewire.kernels.matmul.hopper.narrowing import narrow
from tilewire.kernels.matmul.hopper.stages import change_stages
from tilewire.kernels.matmul.variants import box_shapes, build
from tilewire.kernels.runtime.launch import Descriptor, has_whole_boxes
from tilewire.kernels.runtime.targets import KNOWN

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
    assert change_stages() == ("", "")
    given = program("\t// columns 24 %r90", product(32, REGISTERS))
    stages: dict[str, Any] = {"ptx": lambda source, metadata: source, "cubin": str}
    change_stages(None, stages, None, None, 90)
    assert stages["ptx"](given, {}) == narrow(given)
    assert stages["cubin"] is str
    # A device that is not NVIDIA's has no such stage.
    amd = {"amdgcn": str}
    change_stages(None, amd, None, None, None)
    assert amd == {"amdgcn": str}


@pytest.mark.parametrize(("rows", "is_whole"), [(128, True), (112, False), (144, True), (152, False)])
def test_boxes_smaller_than_their_places_are_told_from_whole_ones(rows, is_whole):
    # Triton's own launcher moves whole boxes: the barriers of such a binary would wait for other numbers of bytes.
    specialization = Specialization("wgmma", "bfloat16", "ieee", "k", "n", "tma", "bfloat16", is_plain=True)
    config = Config("wgmma", rows, 128, 64, num_warps=8, num_stages=5, is_persistent=True, is_swapped=True)
    boxes = box_shapes(specialization, config)
    values = {f"{name}_desc": Descriptor((512, 512), (512, 1), box) for name, box in boxes.items()}
    assert has_whole_boxes(build(specialization, config, KNOWN["nvidia_h200"]), values | {"m": 512}) == is_whole

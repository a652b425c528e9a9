"""What a launch reads and writes: operands that its jobs share count once, steps of a program under their own ops."""

from __future__ import annotations

from tests.support.jobs import template_of
from tilewire.service.engine.loop.resolve import plan_of
from tilewire.service.engine.metrics import joint_work
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType, Work
from tilewire.service.ops.program.op import ProgramOptions

A, B = TensorType("float16", (4, 32)), TensorType("float16", (32, 8))
OUT_BYTES = 4 * 8 * 2
FLOPS = 2 * 4 * 32 * 8

PROGRAM = """{"inputs":{"x":{"dtype":"float16","shape":[-1,32]}},"steps":[
{"op":"matmul","inputs":{"a":"x","b":"@w"},"as":"h"},{"op":"softmax","inputs":{"x":"h"},"as":"p"}],"outputs":["p"]}"""


def product(resident: str | None) -> tuple[Work, ...]:
    template = template_of("matmul", MatmulOptions(), {"a": A, "b": B}, {} if resident is None else {"b": resident})
    return plan_of(template, "cpu").work


def launch_bytes(batch: list[tuple[Work, ...]]) -> int:
    (work,) = joint_work(batch)
    assert (work.op, work.dtype, work.flops) == ("matmul", "float16", len(batch) * FLOPS)
    return work.moved_bytes


def test_one_job_reads_each_operand_once() -> None:
    assert launch_bytes([product(None)]) == A.nbytes + B.nbytes + OUT_BYTES
    assert launch_bytes([product("w")]) == A.nbytes + B.nbytes + OUT_BYTES


def test_a_weight_that_a_batch_shares_is_read_once() -> None:
    assert launch_bytes([product("w")] * 64) == 64 * (A.nbytes + OUT_BYTES) + B.nbytes


def test_operands_in_the_bodies_are_all_read() -> None:
    assert launch_bytes([product(None)] * 64) == 64 * (A.nbytes + B.nbytes + OUT_BYTES)


def test_a_programs_steps_are_counted_under_their_own_ops() -> None:
    template = template_of("program", ProgramOptions(PROGRAM), {"x": A, "@w": B}, {"@w": "w"})
    matmul, softmax = joint_work([plan_of(template, "cpu").work] * 3)
    assert matmul == Work("matmul", "float16", 3 * FLOPS, 3 * (A.nbytes + OUT_BYTES) + B.nbytes, B.nbytes)
    assert (softmax.op, softmax.moved_bytes, softmax.shared_bytes) == ("softmax", 3 * 2 * OUT_BYTES, 0)

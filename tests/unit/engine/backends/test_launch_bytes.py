"""What a launch reads and writes: operands that its jobs share count once."""

from __future__ import annotations

from tilewire.service.engine.metrics import launch_bytes
from tilewire.service.ipc.messages import Job, Operand
from tilewire.service.ops.registry import OPS, Limits, MatmulOptions, TensorType, plan

A, B = TensorType("float16", (4, 32)), TensorType("float16", (32, 8))
OUT_BYTES = 4 * 8 * 2


def product(resident: str | None) -> Job:
    planned = plan(OPS["matmul"], {"a": A, "b": B}, MatmulOptions(), Limits())
    operands = {"a": Operand(A, 0), "b": Operand(B, 256) if resident is None else Operand(B, resident=resident)}
    return Job(1, "matmul", operands, MatmulOptions(), planned.out, 1024, planned.flops, planned.moved_bytes)


def test_one_job_reads_each_operand_once() -> None:
    assert launch_bytes([product(None)]) == A.nbytes + B.nbytes + OUT_BYTES
    assert launch_bytes([product("w")]) == A.nbytes + B.nbytes + OUT_BYTES


def test_a_weight_that_a_batch_shares_is_read_once() -> None:
    assert launch_bytes([product("w")] * 64) == 64 * (A.nbytes + OUT_BYTES) + B.nbytes


def test_operands_in_the_bodies_are_all_read() -> None:
    assert launch_bytes([product(None)] * 64) == 64 * (A.nbytes + B.nbytes + OUT_BYTES)

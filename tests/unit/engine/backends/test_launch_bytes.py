"""What a launch reads and writes: operands that its jobs share count once."""

from __future__ import annotations

from tests.support.jobs import template_of
from tilewire.service.engine.metrics import launch_bytes
from tilewire.service.ipc.messages import Template
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType

A, B = TensorType("float16", (4, 32)), TensorType("float16", (32, 8))
OUT_BYTES = 4 * 8 * 2


def product(resident: str | None) -> Template:
    return template_of("matmul", MatmulOptions(), {"a": A, "b": B}, {} if resident is None else {"b": resident})


def test_one_job_reads_each_operand_once() -> None:
    assert launch_bytes([product(None)]) == A.nbytes + B.nbytes + OUT_BYTES
    assert launch_bytes([product("w")]) == A.nbytes + B.nbytes + OUT_BYTES


def test_a_weight_that_a_batch_shares_is_read_once() -> None:
    assert launch_bytes([product("w")] * 64) == 64 * (A.nbytes + OUT_BYTES) + B.nbytes


def test_operands_in_the_bodies_are_all_read() -> None:
    assert launch_bytes([product(None)] * 64) == 64 * (A.nbytes + B.nbytes + OUT_BYTES)

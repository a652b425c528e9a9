"""`tilewire tune` and `tilewire explain`: what a person sees who cannot tune, and why a shape gets its configuration.

The kernels are imported by the tests, not with this file: `tests/kernels` must be the first to import Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewire._installing import how_to_install
from tilewire.service.cli.app import app


def test_the_command_line_itself_needs_no_torch() -> None:
    code = "import sys, tilewire.service.cli.app; print({'torch', 'triton', 'kernels'} & set(sys.modules))"
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["tune", "--ops", "matmul,conv"], 2, "--ops: 'conv' is none of matmul, softmax"),
        (["tune"], 1, "there is no GPU"),
        (["tune", "--seconds", "0"], 2, "--seconds"),
        (["explain", "matmul", "4x4", "--device", "nvidia_h200"], 2, "expected MXNXK, got '4x4'"),
        (["explain", "add", "4x4", "--device", "nvidia_h200"], 2, "expected matmul or softmax"),
        (["explain", "matmul", "4x4x4", "--device", "my_card"], 2, "--device: 'my_card' is none of nvidia_a100"),
        (["explain", "matmul", "4x4x4"], 2, "name one with --device"),
        (["explain", "matmul", "4x4x4", "--dtype", "int4", "--device", "nvidia_h200"], 2, "dtype: expected one of"),
        (["explain", "matmul", "0x4x4", "--device", "nvidia_h200"], 2, "m: expected a whole number from 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status
    assert message in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["explain", "add", "4x4"], 2, "explain: 'add': expected matmul or softmax"),
        (["explain", "matmul", "4x4"], 2, "explain: expected MXNXK, got '4x4'"),
        (["explain", "softmax", "4x4", "--device", "my_card"], 2, "--device: 'my_card' is none of nvidia_a100"),
        (["explain", "matmul", "4x4x4"], 1, f"explain: needs Triton; run: {how_to_install('triton')}"),
        (["tune"], 1, f"tune: needs Triton; run: {how_to_install('triton')}"),
        (["precompile", "--target", "cuda:12"], 2, "'cuda:12' is not one of cuda:80"),
        (["precompile", "--target", "cuda:90"], 2, f"precompile: needs Triton; run: {how_to_install('triton')}"),
    ],
)
def test_without_triton_wrong_arguments_come_first_and_then_how_to_install_it(
    arguments: list[str], status: int, message: str
) -> None:
    code = "import sys; sys.modules['triton'] = None; from tilewire.service.cli.app import app; app()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["matmul", "504x1832x4832", "--dtype", "bfloat16"],
            ["bfloat16 504x1832x4832 by table cuda_90_132: wgmma", "µs", "next"],
        ),
        (["matmul", "64x4096x4096", "--dtype", "float8_e4m3fn", "--precision", "fast"], ["float8_e4m3fn", "µs"]),
        (["softmax", "65536x33", "--dtype", "float32"], ["row", "cuda_90_132", "µs", "elements"]),
    ],
)
def test_one_line_explains_a_choice(arguments: list[str], parts: list[str]) -> None:
    result = CliRunner().invoke(app, ["explain", *arguments, "--device", "nvidia_h200"])
    assert result.exit_code == 0, result.output
    assert result.output.count("\n") == 1
    for part in parts:
        assert part in result.output

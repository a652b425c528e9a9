"""`tilewire tune`: what a person sees who cannot tune, and who did.

The kernels are imported by the tests, not with this file: `tests/kernels` must be the first to import Triton.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

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
        (["--ops", "matmul,conv"], 2, "--ops: 'conv' is none of matmul, softmax, add"),
        (["--shapes", "no-such-file"], 2, "--shapes: [Errno 2] No such file"),
        (["--device", "99"], 1, "there is no GPU 99"),
        (["--budget-s", "0"], 2, "--budget-s"),
    ],
)
def test_what_cannot_be_tuned_is_said(arguments: list[str], status: int, message: str) -> None:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == status
    assert message in result.output


def test_a_bad_shape_is_named_by_its_line(tmp_path: Path) -> None:
    shapes = tmp_path / "shapes.jsonl"
    shapes.write_text('{"op": "softmax", "rows": 1, "n": 2}\n{"op": "add", "rows": 0, "n": 2}\n')
    result = CliRunner().invoke(app, ["tune", "--shapes", str(shapes)])
    assert result.exit_code == 2
    assert f"{shapes}:2: rows: expected a whole number from 1, got 0" in result.output.replace("\n", "")


def test_shapes_are_read_and_none_is_an_error(tmp_path: Path) -> None:
    from tilewire.kernels.autotune.workloads import Product, WorkloadError
    from tilewire.service.cli.tune import read

    shapes = tmp_path / "shapes.jsonl"
    shapes.write_text('{"op": "matmul", "m": 1, "n": 2, "k": 3}\n')
    assert read(shapes) == (Product(1, 2, 3),)
    shapes.write_text("# nothing\n")
    with pytest.raises(WorkloadError, match="holds no shape"):
        read(shapes)


def test_the_report_says_what_was_gained_and_lost() -> None:
    from tilewire.kernels.autotune.run import Tuned
    from tilewire.kernels.autotune.settling import Summary
    from tilewire.service.cli.tune import report

    text = io.StringIO()
    summary = Summary("matmul", 40, 12, 1.0432, 0.991, 1.512)
    tuned = Tuned(
        Path("table.json"), [summary], [("a candidate", "640 bytes of registers spilled")], True, (1500, 1510)
    )
    report(Console(file=text, width=120), tuned)
    shown = text.getvalue()
    for part in (
        "matmul",
        "40",
        "12",
        "1.043",
        "0.991",
        "1.512",
        "1510 binaries",
        "1500 before",
        "640 bytes",
        "goes on",
    ):
        assert part in shown


def test_progress_names_the_part_and_counts() -> None:
    from tilewire.kernels.autotune.session import Step
    from tilewire.service.cli.tune import Shown

    text = io.StringIO()
    with Shown(Console(file=text, width=120, force_terminal=True)) as shown:
        shown.step(Step("matmul half", "race", 3, 40))
        shown.step(Step("matmul half", "race", 4, 40))
    assert "matmul half: race" in text.getvalue()
    assert "4/40" in text.getvalue()


def test_a_second_ctrl_c_does_not_interrupt_what_the_first_began() -> None:
    from tilewire.service.cli.tune import _interrupt_once

    before = signal.signal(signal.SIGINT, _interrupt_once)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

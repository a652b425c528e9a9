"""`tilewire tune` and `tilewire explain`: measuring this machine's GPU, and why a shape gets its configuration.

Imports torch, and Triton where it is installed: the command line imports it by name, when the command runs. What cannot be
imported without Triton is imported once that is there.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tilewire.kernels.runtime.layouts import preferred_layout
from tilewire.kernels.runtime.targets import KNOWN, current, is_interpreting
from tilewire.kernels.selection import tables
from tilewire.service.cli.missing import needs_triton

EXIT_FAILED = 1
EXIT_USAGE = 2
_SIZES = {"matmul": ("m", "n", "k"), "softmax": ("rows", "n")}


def run(ops: Sequence[str], seconds: float, measured: Path, out: Path | None) -> int:
    """Measures random shapes, fits the device's table to them and writes it; the exit status.

    What `measured` has already is not measured again.
    """
    if not _has_triton():
        return _refuse(needs_triton("tune"), EXIT_FAILED)
    from tilewire.kernels.autotune import collect, fitting  # noqa: PLC0415
    from tilewire.kernels.registry import tuned_ops  # noqa: PLC0415

    known = [op.name for op in tuned_ops()]
    unknown = [name for name in ops if name not in known]
    if unknown:
        return _refuse(f"tune: --ops: {unknown[0]!r} is none of {', '.join(known)}", EXIT_USAGE)
    if not torch.cuda.is_available():
        return _refuse("tune: there is no GPU that torch can use", EXIT_FAILED)
    table = out or Path(tables.__file__).parent / "tuned" / f"{current(0).chip}.json"
    status = collect.main(["--out", str(measured), "--seconds", str(seconds), "--ops", ",".join(ops)])
    return status or fitting.main([str(measured / collect.FILE), "--out", str(table), "--held-out", "0"])


def explain(op: str, sizes: str, dtype: str, precision: str, device: str) -> int:
    """Prints why a shape, `MxNxK` or `ROWSxN`, gets its configuration, by default on this machine's device; the exit status."""
    if device and device not in KNOWN:
        return _refuse(f"explain: --device: {device!r} is none of {', '.join(KNOWN)}", EXIT_USAGE)
    names = _SIZES.get(op)
    if names is None:
        return _refuse(f"explain: {op!r}: expected matmul or softmax; other ops choose by size alone", EXIT_USAGE)
    numbers = re.fullmatch("x".join([r"(\d+)"] * len(names)), sizes)
    if numbers is None:
        return _refuse(f"explain: expected {'x'.join(names).upper()}, got {sizes!r}", EXIT_USAGE)
    if not _has_triton():
        return _refuse(needs_triton("explain"), EXIT_FAILED)
    if not device and (is_interpreting() or not torch.cuda.is_available()):
        return _refuse("explain: there is no GPU here: name one with --device", EXIT_USAGE)
    from tilewire.kernels.autotune.workloads import parse_line  # noqa: PLC0415
    from tilewire.kernels.op import ShapeError  # noqa: PLC0415
    from tilewire.kernels.registry import kernel_op  # noqa: PLC0415

    fields = ", ".join(f'"{name}": {number}' for name, number in zip(names, numbers.groups(), strict=True))
    more = ""
    if op == "matmul":
        # As staging and uploads lay `b` out.
        b_major = "k" if preferred_layout(op, "b", dtype, precision).is_k_major else "n"
        more = f', "precision": "{precision}", "b_major": "{b_major}"'
    try:
        shape = parse_line(f'{{"op": "{op}", {fields}, "dtype": "{dtype}"{more}}}')
    except ShapeError as error:
        return _refuse(f"explain: {error}", EXIT_USAGE)
    found = kernel_op(op).explain
    assert found is not None, "This is a bug."
    sys.stdout.write(found(shape, KNOWN[device] if device else current(0)) + "\n")
    return 0


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _refuse(text: str, status: int) -> int:
    sys.stderr.write(text + "\n")
    return status

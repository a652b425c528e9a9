"""Measuring what the configurations of a device's table cost, and writing them back. Needs that device.

`python -m kernels.tuning --out FILE` measures every configuration that the table lists for tall products: the cost of a
tile and of a step of K, with one program on each multiprocessor and with as many as the entry says. To try another
configuration, add it to the table (costs may be missing) and run this.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from kernels.matmul.choice import config_of, family_of
from kernels.matmul.configs import Config, Finish, Problem
from kernels.matmul.plan import PreparedMatmul
from kernels.matmul.variants import build
from kernels.matmul.view import View
from kernels.measuring import measure
from kernels.tables import table_for
from kernels.targets import Target, current

_DTYPES = {"half": "bfloat16", "int8": "int8", "float8": "float8_e4m3fn", "tf32": "float32", "tf32x3": "float32"}
_OUT = {"int8": "int32", "float8_e4m3fn": "bfloat16"}
_STEPS = (8, 40)
# Long sums also wait for memory, which makes a step look dearer and a tile cheaper than any can be.
_LEAST_TILE_US = 1.0


def calibrate(table: dict[str, Any], target: Target) -> dict[str, Any]:
    """Measure every entry of `table["matmul"]["tiles"]` and put its costs into it.

    Args:
        table: changed in place.
        target: of the current device.

    Returns:
        `table`.
    """
    entries = [(key, entry) for key, several in table["matmul"]["tiles"].items() for entry in several]
    jobs = [(_problem(key, config_of(entry), target.num_sms, 8), config_of(entry), target) for key, entry in entries]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        compiled = list(pool.map(_compile, jobs))
    for (key, entry), is_compiled in zip(entries, compiled, strict=True):
        if not is_compiled:
            continue
        config, most = config_of(entry), entry["programs_per_sm"]
        alone, full = (_costs(key, config, target.num_sms * programs) for programs in (1, most))
        entry["tile_us"] = [round(alone[0], 3), round(full[0], 3)]
        entry["step_us"] = [round(alone[1], 4), round(full[1], 4)]
    return table


def _compile(job: tuple[Problem, Config, Target]) -> bool:
    """Compile into the disk cache; whether that worked."""
    problem, config, target = job
    try:
        compiled = build(family_of(problem, config, is_plain=True), config, target).compile(target)
    except Exception as error:  # noqa: BLE001 - any failure of the compiler only discards a candidate
        sys.stderr.write(f"{config}: {type(error).__name__}\n")
        return False
    return bool(compiled.metadata.shared <= target.shared_bytes)


def _costs(key: str, config: Config, num_tiles: int) -> tuple[float, float]:
    """Microseconds of a tile without its steps, and of a step, when `num_tiles` run at once."""
    times = [_time(_problem(key, config, num_tiles, steps), config) for steps in _STEPS]
    step_us = (times[1] - times[0]) / (_STEPS[1] - _STEPS[0])
    return max(_LEAST_TILE_US, times[0] - _STEPS[0] * step_us), step_us


def _problem(key: str, config: Config, num_tiles: int, steps: int) -> Problem:
    across = max(divisor for divisor in range(1, 13) if num_tiles % divisor == 0)
    m, n, k = config.block_m * (num_tiles // across), config.block_n * across, config.block_k * steps
    dtype = _DTYPES[key]
    precision = key if dtype == "float32" else "ieee"
    return Problem(m, n, k, 1, dtype, _OUT.get(dtype, dtype), "k", "n" if key == "half" else "k", precision)


def _time(problem: Problem, config: Config) -> float:
    m, n, k = problem.m, problem.n, problem.k
    b_strides = (0, 0, n, 1) if problem.b_major == "n" else (0, 0, 1, k)
    view = View(m, n, k, (1, 1), (0, 0, k, 1), b_strides, (0, 0, n, 1))
    dtype = getattr(torch, problem.dtype)
    a, b = (_random((m, k), dtype), _random((k, n) if problem.b_major == "n" else (n, k), dtype))
    out = torch.empty((m, n), dtype=getattr(torch, problem.out_dtype), device="cuda")
    prepared = PreparedMatmul(view, problem, Finish(), config, a.device)
    return measure({"it": lambda _: prepared(a, b, out)}, rounds=11)["it"].p50_us


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    values = torch.randn(shape, device="cuda")
    return values.to(dtype) if dtype.is_floating_point else (values * 40).clamp(-128, 127).to(dtype)


def as_text(table: dict[str, Any]) -> str:
    """JSON with one configuration a line, so that changes can be read."""
    text = json.dumps(table, indent=1)
    innermost = re.compile(r"\{\n\s+(\"[^{}]*)\n\s+\}")
    return innermost.sub(lambda match: "{" + re.sub(r"\s*\n\s*", " ", match[1]) + "}", text) + "\n"


def run(argv: list[str]) -> int:
    """Calibrate the current device's table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the table to write")
    arguments = parser.parse_args(argv)
    target = current(torch.cuda.current_device())
    table = calibrate(json.loads(json.dumps(table_for(target))), target)
    arguments.out.write_text(as_text(table))
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

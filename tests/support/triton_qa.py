"""NVIDIA's own QA over HTTP and gRPC, from a checkout of triton-inference-server/server that the tester supplies.

    make qa TRITON=path/to/server

The QA models are add, subtract and identity, so kept programs stand for them under the same names: nothing of the server is
there for tests alone. The files expect a server at the ports 8000 and 8001. Each test runs, or is skipped by name with the
reason; one that this file does not name runs, too, so that a newer checkout shows what is new. Needs `psutil` beside the extra
`dev`.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from tests.support.live_server import serving
from tilewire import Client

PORT, GRPC_PORT = 8000, 8001
FLAGS = ("--gateways", "2", "--grpc-port", str(GRPC_PORT), "--allow-shared-memory", "--arena-bytes", "1GiB")
ZERO = {"float32": "qa/zero-float32", "int64": "qa/zero-int64"}

# Folders of the QA by module.
MODULES = {
    "http_test": "L0_http",
    "infer_zero_test": "L0_infer_zero",
    "input_validation_test": "L0_input_validation",
    "large_payload_test": "L0_large_payload",
    "nan_inf_test": "L0_nan_inf",
    "shared_memory_test": "L0_shared_memory",
    "python_grpc_aio_test": "L0_grpc",
    "python_unit_test": "L0_grpc",
}
# Those that come over gRPC; the first one comes over HTTP, too.
GRPC_MODULES = ("shared_memory_test", "python_grpc_aio_test", "python_unit_test")

# Tests that cannot apply, by a pattern of `module.Class.test`, and why.
SKIPPED = {
    r"\.test_byte|_oo|_bb|object|string": "BYTES and BOOL are no dtypes of linear algebra",
    r"_hh": "FP16 models of other names; the FP32 ones run the same code",
    r"test_python_client_leak": "measures NVIDIA's client, not the server",
    r"test_multi_variable_dimensions": "an FP16 model",
    r"test_descriptive_status_code": "needs a model that is slow on purpose",
    r"test_loading|test_load_|test_unload_model|test_model_name|test_repository_index_deeply": "models are not loaded by calls",
    r"_trace_settings": "no call sets traces; spans go to a collector (docs/operations/monitoring.md)",
    r"RestrictedProtocolTest\.test_(health|infer|model_repository|stream_infer)": "wants a server with restricted calls; API "
    "keys restrict here (tests/contract/test_grpc_statuses.py)",
    r"test_json_recursion_depth_limit": "half of it is BYTES; tests/unit/gateway/codecs/test_json_numbers.py has the depth",
    r"test_input_shape_validation|test_wrong_input_shape|test_input_validation": "Python, PyTorch and TensorRT models",
    r"large_payload": "bodies of 3 GiB",
    r"nan_inf_test\.": "a Python model without use of its input; tests/contract/test_oip.py has NaN and infinity in JSON",
    r"test_large_shm_register_offset": "a Python model",
    r"test_client_shm_disabled_by_default": "wants a server without shared memory; tests/contract/test_shared_memory.py has it",
}

# Tests whose words or statuses are Triton's own, where ours are documented to differ.
DIFFERENT = {
    r"test_buffer_size_overflow|test_duplicate_output_names|test_multi_inputs|test_infer_byte_size_out_of_bound": "400 as "
    "there, in other words",
    r"test_reregister_after|test_register_invalid_shm_key|test_register_reserved|test_register_out_of_bound": "400 as there, "
    "in other words",
    r"test_content_encoding_chunked_manually": "a length beside chunks is 400: proxies disagree about its end",
    r"test_infer_integer_overflow|test_infer_offset_out_of_bound|test_too_big_shm": "400 as there, in other words",
    r"test_unregister_shm_during_inference": "needs a model that waits; tests/integration/test_shared_memory_lives.py has it",
    r"test_negative_dimensions": "400; Triton's 500 is its own",
    r"\.test_get_model_repository_index": "counts the models of its own server",
    r"\.test_get_server_metadata": "wants the name `triton`",
    r"\.test_register_(cuda|system)_shared_memory": "refused as there, in other words",
}


def identity(num: int, dtype: str, rank: int) -> dict[str, Any]:
    """A program of `num` inputs that come out as they are."""
    steps = [
        {"op": "add", "inputs": {"a": f"INPUT{i}", "b": f"@{ZERO[dtype]}"}, "as": f"OUTPUT{i}"} for i in range(num)
    ]
    return {
        "inputs": {f"INPUT{i}": {"dtype": dtype, "shape": [-1] * rank} for i in range(num)},
        "steps": steps,
        "outputs": [f"OUTPUT{i}" for i in range(num)],
    }


SIMPLE = {
    "inputs": {name: {"dtype": "int32", "shape": [-1, 16]} for name in ("INPUT0", "INPUT1")},
    "steps": [
        {"op": "add", "inputs": {"a": "INPUT0", "b": "INPUT1"}, "options": {"alpha": alpha}, "as": f"OUTPUT{number}"}
        for number, alpha in enumerate((1, -1))
    ],
    "outputs": ["OUTPUT0", "OUTPUT1"],
}


def programs() -> Iterator[tuple[str, dict[str, Any]]]:
    """The models of the QA by name."""
    yield "simple", SIMPLE
    yield "simple_identity_int64", identity(1, "int64", 2)
    for num in (1, 3):
        for name in ("onnx", "simple_zero", "sequence_zero", "fan_zero"):
            yield f"{name}_zero_{num}_float32", identity(num, "float32", 2)
            yield f"{name}_nobatch_zero_{num}_float32", identity(num, "float32", 1)


def keep_models(url: str) -> None:
    """Keeps the programs."""
    with Client(url) as client:
        for dtype, name in ZERO.items():
            client.put(name, np.zeros(1, dtype))
        for name, program in programs():
            client.program(name, program)


def tests_of(suite: unittest.TestSuite | unittest.TestCase) -> Iterator[unittest.TestCase]:
    """All tests of a suite."""
    if isinstance(suite, unittest.TestCase):
        yield suite
        return
    for one in suite:
        yield from tests_of(one)


def reason_of(name: str) -> str | None:
    """Why a test does not run."""
    other = {"http": "_grpc", "grpc": "_http"}[os.environ["CLIENT_TYPE"]]
    if name.startswith("shared_memory_test.") and name.endswith(other):
        return "for the other client"
    return next((reason for pattern, reason in (SKIPPED | DIFFERENT).items() if re.search(pattern, name)), None)


def run_module(folder: Path, module: str) -> int:
    """Runs one module in this process; returns the number of failures."""
    os.chdir(folder)
    sys.path[:0] = [str(folder), str(folder.parent / "common")]
    os.environ.setdefault("BACKENDS", "onnx")
    try:
        loaded = importlib.import_module(module)
    except (ImportError, AttributeError) as error:
        # Such as a name that NumPy 2 has no more.
        print(f"skipped  {module}: {error}")
        return 0
    failures = 0
    for test in tests_of(unittest.defaultTestLoader.loadTestsFromModule(loaded)):
        name = f"{module}.{test.id().split('.', 1)[1]}"
        reason = reason_of(name)
        if reason is not None:
            print(f"skipped  {name}: {reason}")
            continue
        with httpx.Client(base_url=f"http://localhost:{PORT}", trust_env=False) as client:
            # Their script starts the server anew for each test.
            client.post("/v2/systemsharedmemory/unregister").raise_for_status()
        result = unittest.TestResult()
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            test.run(result)
        broken = result.errors + result.failures
        failures += bool(broken)
        print(
            f"{'FAILED ' if broken else 'passed '}  {name}" + (f": {broken[0][1][-600:]}" if broken else ""), flush=True
        )
    return failures


def main(argv: Sequence[str]) -> int:
    """Runs the QA; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="checkout of triton-inference-server/server")
    parser.add_argument("--module", help="run only this one, against the server that is there")
    given = parser.parse_args(argv)
    qa = given.checkout.resolve() / "qa"
    if given.module:
        return int(run_module(qa / MODULES[given.module], given.module) > 0)
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder, "log"), *FLAGS, "--port", str(PORT)) as server:
        keep_models(server.url)
        command = [sys.executable, "-m", "tests.support.triton_qa", str(given.checkout), "--module"]
        statuses = []
        over_http = [module for module, folder in MODULES.items() if folder != "L0_grpc"]
        for module, client in (*((one, "http") for one in over_http), *((one, "grpc") for one in GRPC_MODULES)):
            print(f"{module}, {client}", flush=True)
            done = subprocess.run([*command, module], env={**os.environ, "CLIENT_TYPE": client}, check=False)
            statuses.append(done.returncode)
    return max(statuses)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""KServe's own gRPC client against a running server, as it is installed.

It needs an older protobuf than we pin, so it runs in an environment of its own: `KSERVE_PYTHON` is the Python of one where
`pip install kserve` was done. Without one these tests skip themselves.
"""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.support.live_server import LiveServer

SCRIPT = """
import asyncio, json, sys
import numpy as np
from kserve import InferenceGRPCClient, InferInput, InferRequest

A = np.arange(6, dtype=np.float32).reshape(2, 3)

async def main(address):
    found = {}
    async with InferenceGRPCClient(address) as client:
        found["live"] = await client.is_server_live()
        found["ready"] = await client.is_server_ready()
        found["models"] = [await client.is_model_ready(name) for name in ("add", "nonsense")]
        inputs = [InferInput(name, [2, 3], "FP32") for name in "ab"]
        for one in inputs:
            one.set_data_from_numpy(A, binary_data=True)
        answer = await client.infer(InferRequest(model_name="add", infer_inputs=inputs, request_id="raw"))
        found["raw"] = [answer.id, answer.outputs[0].as_numpy().tolist()]
        inputs = [InferInput(name, [2, 3], "FP32", data=A.reshape(-1).tolist()) for name in "ab"]
        request = InferRequest(model_name="add", infer_inputs=inputs, parameters={"alpha": 2})
        found["typed"] = (await client.infer(request)).outputs[0].as_numpy().tolist()
    print(json.dumps(found))

asyncio.run(main(sys.argv[1]))
"""


def test_kserves_client_works_unmodified(grpc_server: LiveServer) -> None:
    python = os.environ.get("KSERVE_PYTHON")
    if python is None:
        pytest.skip("no KSERVE_PYTHON: the Python of an environment with kserve")
    command = [python, "-c", SCRIPT, grpc_server.grpc_address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "live": True,
        "ready": True,
        "models": [True, False],
        "raw": ["raw", [[0, 2, 4], [6, 8, 10]]],
        "typed": [[0, 3, 6], [9, 12, 15]],
    }

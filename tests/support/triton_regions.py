"""The protocol's own client with shared memory: objects, the regions made of them, and tensors in them. Knows no test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as triton
from ml_dtypes import bfloat16
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.support.live_server import LiveServer
from tests.support.shared_objects import shared_object
from tests.support.tensor_bodies import Array

A = np.arange(12, dtype=np.float32).reshape(3, 4)
B = np.arange(20, dtype=np.float32).reshape(4, 5)
DATATYPES = {np.dtype(bfloat16): "BF16"}


@contextlib.contextmanager
def connected(server: LiveServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=4) as client:
        yield client
        with contextlib.suppress(InferenceServerException):
            client.unregister_system_shared_memory()


class Regions:
    """Objects and the regions made of them."""

    def __init__(self, client: triton.InferenceServerClient, stack: contextlib.ExitStack) -> None:
        self.client = client
        self._stack = stack

    def add(self, name: str, content: bytes | int, offset: int = 0) -> Path:
        """An object, all of which from `offset` on is a region."""
        path = self._stack.enter_context(shared_object(content))
        self.client.register_system_shared_memory(name, f"/{path.name}", path.stat().st_size - offset, offset)
        return path


def given(name: str, array: Array, region: str | None = None, offset: int = 0) -> triton.InferInput:
    datatype = DATATYPES.get(array.dtype) or np_to_triton_dtype(array.dtype)
    one = triton.InferInput(name, list(array.shape), datatype)
    if region is None:
        return one.set_data_from_numpy(array)
    return one.set_shared_memory(region, array.nbytes, offset)


def wanted(region: str, byte_size: int, offset: int = 0, name: str = "out") -> triton.InferRequestedOutput:
    out = triton.InferRequestedOutput(name)
    out.set_shared_memory(region, byte_size, offset)
    return out


def read(path: Path, like: Array, offset: int = 0) -> Array:
    return np.frombuffer(path.read_bytes()[offset : offset + like.nbytes], like.dtype).reshape(like.shape)


def infer(
    client: triton.InferenceServerClient,
    model: str,
    inputs: Sequence[triton.InferInput],
    out: triton.InferRequestedOutput | None = None,
) -> triton.InferResult:
    return client.infer(model, inputs, outputs=None if out is None else [out])


def refused(status: int, text: str) -> contextlib.AbstractContextManager[object]:
    return pytest.raises(InferenceServerException, match=rf"^\[{status}\] .*{text}")

"""The Tilewire client: NumPy arrays in, NumPy arrays out, over HTTP; arrays of torch, JAX and CuPy likewise.

import numpy as np
import tilewire

with tilewire.Client("http://127.0.0.1:8000") as client:
    w = client.put("weights/w1", np.ones((4, 4), dtype=np.float32))
    out = client.matmul(np.ones((2, 4), dtype=np.float32), w, activation="gelu")
"""

import importlib
from typing import TYPE_CHECKING, Any

from tilewire import _options
from tilewire._options import *  # noqa: F403  (its `__all__`)
from tilewire._version import __version__

if TYPE_CHECKING:
    from tilewire._clients.async_client import AsyncClient
    from tilewire._clients.async_programs import AsyncKeptProgram, AsyncPrograms
    from tilewire._clients.async_tensors import AsyncTensor, AsyncTensors
    from tilewire._clients.client import Client
    from tilewire._clients.programs import KeptProgram, Programs
    from tilewire._clients.tensors import Tensor, Tensors
    from tilewire._errors import (
        BadRequest,
        Busy,
        ConnectionFailed,
        DeadlineExceeded,
        Forbidden,
        Lost,
        NotFound,
        PreconditionFailed,
        QuotaExceeded,
        ServerError,
        TilewireError,
        TooLarge,
        Unauthorized,
        Unavailable,
        Unprocessable,
    )
    from tilewire._programs.program import InputSpec, Program, Step
    from tilewire._programs.trace import Traced
    from tilewire._types import Answer, TensorInfo, TopK

__all__ = [
    "Answer",
    "AsyncClient",
    "AsyncKeptProgram",
    "AsyncPrograms",
    "AsyncTensor",
    "AsyncTensors",
    "BadRequest",
    "Busy",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Forbidden",
    "InputSpec",
    "KeptProgram",
    "Lost",
    "NotFound",
    "PreconditionFailed",
    "Program",
    "Programs",
    "QuotaExceeded",
    "ServerError",
    "Step",
    "Tensor",
    "TensorInfo",
    "Tensors",
    "TilewireError",
    "TooLarge",
    "TopK",
    "Traced",
    "Unauthorized",
    "Unavailable",
    "Unprocessable",
    "__version__",
]
__all__ += _options.__all__

# The server lives in the same package and needs neither httpx nor NumPy: each module of the client is loaded at first use.
_HOMES = {
    "AsyncClient": "tilewire._clients.async_client",
    "AsyncKeptProgram": "tilewire._clients.async_programs",
    "AsyncPrograms": "tilewire._clients.async_programs",
    "AsyncTensor": "tilewire._clients.async_tensors",
    "AsyncTensors": "tilewire._clients.async_tensors",
    "Client": "tilewire._clients.client",
    "KeptProgram": "tilewire._clients.programs",
    "Programs": "tilewire._clients.programs",
    "Tensor": "tilewire._clients.tensors",
    "Tensors": "tilewire._clients.tensors",
    "BadRequest": "tilewire._errors",
    "Busy": "tilewire._errors",
    "ConnectionFailed": "tilewire._errors",
    "DeadlineExceeded": "tilewire._errors",
    "Forbidden": "tilewire._errors",
    "Lost": "tilewire._errors",
    "NotFound": "tilewire._errors",
    "PreconditionFailed": "tilewire._errors",
    "QuotaExceeded": "tilewire._errors",
    "ServerError": "tilewire._errors",
    "TilewireError": "tilewire._errors",
    "TooLarge": "tilewire._errors",
    "Unauthorized": "tilewire._errors",
    "Unavailable": "tilewire._errors",
    "Unprocessable": "tilewire._errors",
    "InputSpec": "tilewire._programs.program",
    "Program": "tilewire._programs.program",
    "Step": "tilewire._programs.program",
    "Traced": "tilewire._programs.trace",
    "Answer": "tilewire._types",
    "TensorInfo": "tilewire._types",
    "TopK": "tilewire._types",
}


def __getattr__(name: str) -> Any:
    """Loads the module that holds a public name."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(__all__)

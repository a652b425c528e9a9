"""The Tilewire client: NumPy arrays in, NumPy arrays out, over HTTP. Needs httpx and NumPy only.

import numpy as np
import tilewire

with tilewire.Client("http://127.0.0.1:8000") as client:
    client.put("weights/w1", np.ones((4, 4), dtype=np.float32))
    out = client.matmul(np.ones((2, 4), dtype=np.float32), "@weights/w1", activation="gelu")
"""

import importlib
from typing import TYPE_CHECKING, Any

from tilewire._version import __version__

if TYPE_CHECKING:
    from tilewire._async_client import AsyncClient
    from tilewire._client import Client
    from tilewire._errors import (
        BadRequest,
        Busy,
        ConnectionFailed,
        DeadlineExceeded,
        Forbidden,
        NotFound,
        QuotaExceeded,
        ServerError,
        TilewireError,
        TooLarge,
        Unauthorized,
        Unavailable,
        Unprocessable,
    )
    from tilewire._types import AddOptions, Answer, MatmulOptions, Operand, SoftmaxOptions, TensorInfo

__all__ = [
    "AddOptions",
    "Answer",
    "AsyncClient",
    "BadRequest",
    "Busy",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "Forbidden",
    "MatmulOptions",
    "NotFound",
    "Operand",
    "QuotaExceeded",
    "ServerError",
    "SoftmaxOptions",
    "TensorInfo",
    "TilewireError",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "Unprocessable",
    "__version__",
]

# The server lives in the same package and needs neither httpx nor NumPy: each module of the client is loaded at first use.
_HOMES = {
    "AsyncClient": "tilewire._async_client",
    "Client": "tilewire._client",
    "BadRequest": "tilewire._errors",
    "Busy": "tilewire._errors",
    "ConnectionFailed": "tilewire._errors",
    "DeadlineExceeded": "tilewire._errors",
    "Forbidden": "tilewire._errors",
    "NotFound": "tilewire._errors",
    "QuotaExceeded": "tilewire._errors",
    "ServerError": "tilewire._errors",
    "TilewireError": "tilewire._errors",
    "TooLarge": "tilewire._errors",
    "Unauthorized": "tilewire._errors",
    "Unavailable": "tilewire._errors",
    "Unprocessable": "tilewire._errors",
    "AddOptions": "tilewire._types",
    "Answer": "tilewire._types",
    "MatmulOptions": "tilewire._types",
    "Operand": "tilewire._types",
    "SoftmaxOptions": "tilewire._types",
    "TensorInfo": "tilewire._types",
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
    return __all__

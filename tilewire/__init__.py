"""The Tilewire client: NumPy arrays in, NumPy arrays out, over HTTP. Needs httpx and NumPy only.

import numpy as np
import tilewire

with tilewire.Client("http://127.0.0.1:8000") as client:
    client.put("weights/w1", np.ones((4, 4), dtype=np.float32))
    out = client.matmul(np.ones((2, 4), dtype=np.float32), "@weights/w1", activation="gelu")
"""

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
]

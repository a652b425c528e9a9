"""Writes `tilewire/_async_client.py` from `tilewire/_client.py`: the same surface, awaited.

python -m tests.support.async_client
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "tilewire"
SOURCE, TARGET = FOLDER / "_client.py", FOLDER / "_async_client.py"

_SYNC_ONLY = re.compile(r"^ *# <sync>\n.*?^ *# </sync>\n", re.MULTILINE | re.DOTALL)
_WORDS = (
    (r"\b(Client|Tensor|Tensors|Programs|KeptProgram)\b(?!`\?)", r"Async\1"),
    (r"\bhttpx\.BaseTransport\b", "httpx.AsyncBaseTransport"),
    (r"\bwire\.Transport\b", "wire.AsyncTransport"),
    (r"\bHttpxTransport\b", "AsyncHttpxTransport"),
    (r"\btime\.sleep\(", "await asyncio.sleep("),
    (r"def __enter__", "async def __aenter__"),
    (r"def __exit__", "async def __aexit__"),
    (r"def close\(", "async def aclose("),
    (r"_transport\.close\(", "_transport.aclose("),
    (r"self\.close\(", "self.aclose("),
    (r"^import importlib\n", "import asyncio\nimport importlib\n"),
    (
        r"^(from tilewire\._transport import wire\n)",
        r"\1from tilewire._transport.async_sockets import AsyncSocketTransport\n",
    ),
    (r"^from tilewire\._transport\.sockets import .*\n", ""),
    (r"\bSocketTransport\(", "AsyncSocketTransport("),
    (r"^from collections\.abc import Callable, Iterator, Mapping\n", "from collections.abc import Callable, Mapping\n"),
    (r"The blocking client", "The asyncio client"),
    (
        r"`_async_client\.py` is written from this file by `(.*)`\.",
        r"Written from `_client.py` by `\1`: change that file.",
    ),
    (r"Calls a Tilewire server and waits for its answers\. Safe.*", "Calls a Tilewire server from asyncio."),
)
# Methods that wait for the server; the rest only builds values.
# fmt: off
_AWAITED = (
    "matmul", "softmax", "add", "search", "topk", "reduce", "normalize", "pointwise",
    "run", "program", "run_program", "trace", "put", "put_file", "get", "get_file",
    "head", "delete", "live", "ready", "wait_ready", "describe", "fetch", "exchange", "__call__",
    "_is_ok", "_do", "_send", "__matmul__", "__rmatmul__", "__add__", "__radd__", "__sub__", "__rsub__",
    "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
)
# fmt: on
_CALLS = re.compile(
    r"(?<!await )((?:self|self\._client|self\._transport)\.(?:"
    r"matmul|softmax|add|run|pointwise|put|get|head|delete|program|ready|describe|fetch|exchange|aclose|_is_ok|_do|_send)\()"
)


def write() -> str:
    """The text of the asyncio client."""
    text = _SYNC_ONLY.sub("", SOURCE.read_text(encoding="utf-8"))
    for pattern, replacement in _WORDS:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    for name in _AWAITED:
        text = re.sub(rf"^( +)def {name}\(", rf"\1async def {name}(", text, flags=re.MULTILINE)
    text = _CALLS.sub(r"await \1", text)
    # An attribute of what was awaited.
    text = re.sub(r"return (await self\..*)\.result$", r"return (\1).result", text, flags=re.MULTILINE)
    return re.sub(r"= (await self\..*)\.result$", r"= (\1).result", text, flags=re.MULTILINE)


if __name__ == "__main__":
    TARGET.write_text(write(), encoding="utf-8")

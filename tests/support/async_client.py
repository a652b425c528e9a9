"""Writes the asyncio client's calls from the blocking one's: the same surface, awaited.

python -m tests.support.async_client
"""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "tilewire" / "_clients"
# What is written, and from what.
WRITTEN = {
    FOLDER / "async_tensors.py": FOLDER / "tensors.py",
    FOLDER / "async_programs.py": FOLDER / "programs.py",
}

_SYNC_ONLY = re.compile(r"^ *# <sync>\n.*?^ *# </sync>\n", re.MULTILINE | re.DOTALL)
_WORDS = (
    (r"\b(Tensor|Tensors|TensorCalls|Programs|ProgramCalls|KeptProgram)\b(?!`\?)", r"Async\1"),
    (r"\b_clients\.tensors\b", "_clients.async_tensors"),
    # In the order of imports.
    (r"^(from tilewire\._clients\.requests import .*\n)(from tilewire\._clients\.async_tensors import .*\n)", r"\2\1"),
    (r"^from collections\.abc import Iterator, Mapping\n", "from collections.abc import Mapping\n"),
    (r"the blocking client", "the asyncio client"),
    (r"`(?:async_\w+)\.py` is written from this file by `(.*)`\.", r"Written from `SOURCE` by `\1`: change that file."),
)
# Methods that wait for the server; the rest only builds values.
# fmt: off
_AWAITED = (
    "matmul", "softmax", "add", "search", "topk", "reduce", "normalize", "pointwise",
    "run", "program", "run_program", "trace", "put", "put_file", "get", "get_file",
    "head", "delete", "describe", "fetch", "__call__", "_do", "_send",
    "__matmul__", "__rmatmul__", "__add__", "__radd__", "__sub__", "__rsub__",
    "__mul__", "__rmul__", "__truediv__", "__rtruediv__",
)
# fmt: on
_CALLS = re.compile(
    r"(?<!await )((?:self|self\._client)\.(?:"
    r"matmul|softmax|add|run|pointwise|put|get|head|delete|program|describe|fetch|_do|_send)\()"
)


def write(source: Path) -> str:
    """The text of a file of the asyncio client."""
    text = _SYNC_ONLY.sub("", source.read_text(encoding="utf-8"))
    for pattern, replacement in _WORDS:
        text = re.sub(pattern, replacement.replace("SOURCE", source.name), text, flags=re.MULTILINE)
    for name in _AWAITED:
        text = re.sub(rf"^( +)def {name}\(", rf"\1async def {name}(", text, flags=re.MULTILINE)
    text = _CALLS.sub(r"await \1", text)
    # An attribute of what was awaited.
    text = re.sub(r"return (await self\..*)\.result$", r"return (\1).result", text, flags=re.MULTILINE)
    return re.sub(r"= (await self\..*)\.result$", r"= (\1).result", text, flags=re.MULTILINE)


if __name__ == "__main__":
    for target, source in WRITTEN.items():
        target.write_text(write(source), encoding="utf-8")

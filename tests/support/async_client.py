"""Writes the asyncio client's calls from the blocking one's: the same surface, awaited.

python -m tests.support.async_client
"""

from __future__ import annotations

import ast
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
    (r"^(from tilewire\._clients\.by_name import .*\n)(from tilewire\._clients\.async_tensors import .*\n)", r"\2\1"),
    (r"^(from collections\.abc import .*)\bIterator, ", r"\1"),
    (r"the blocking client", "the asyncio client"),
    (r"`(?:async_\w+)\.py` is written from this file by `(.*)`\.", r"Written from `SOURCE` by `\1`: change that file."),
)


def _awaited() -> list[str]:
    """Names of the methods that wait: `_send` and `_offload`, and those that call one of these; the rest builds values."""
    calls: dict[str, set[str]] = {}
    for source in WRITTEN.values():
        for node in ast.walk(ast.parse(_SYNC_ONLY.sub("", source.read_text(encoding="utf-8")))):
            if isinstance(node, ast.FunctionDef):
                calls.setdefault(node.name, set()).update(_OWN.findall(ast.unparse(node)))
    found = {"_send", "_offload"}
    while more := {name for name, called in calls.items() if called & found} - found:
        found |= more
    return sorted(found)


_OWN = re.compile(r"\bself\.(?:_client\.)?(\w+)\(")
_AWAITED = _awaited()
_CALLS = re.compile(rf"(?<!await )(\bself\.(?:_client\.)?(?:{'|'.join(_AWAITED)})\()")


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

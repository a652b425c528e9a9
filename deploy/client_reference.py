"""Writes docs/client.md from the client's docstrings: `python -m deploy.client_reference`, and `--check` for CI."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tilewire
from tilewire import _options

PAGE = Path(__file__).resolve().parent.parent / "docs" / "client.md"
EXIT_DIFFERS = 1

INTRODUCTION = """\
<!-- Written by `make docs` from the docstrings of tilewire/. Do not edit. -->
# Client reference

`pip install .` in a clone installs the client; it needs httpx and NumPy only. [The first hour](tutorial.md) shows it
at work. Everything here is imported from `tilewire`, is typed, and is safe to share between threads.

`AsyncClient` has the same methods as [`Client`](#client), each to `await`. `AsyncTensor`, `AsyncTensors`,
`AsyncKeptProgram` and `AsyncPrograms` are its handles. `async with AsyncClient(…) as c` closes it, and so does
`await c.aclose()`.
"""
SECTIONS = {
    "Clients and handles": ("Client", "Tensor", "Tensors", "KeptProgram", "Programs", "Answer", "TensorInfo", "TopK"),
    "Programs": ("Program", "InputSpec", "Step", "Traced"),
    "Options": tuple(name for name in vars(_options) if name in _options.__all__),
}
ERRORS = """
## Errors

All are `TilewireError`, and importable from `tilewire`.

| class | of | when |
|---|---|---|
"""
# Bases of other options, the larger first; a `TypedDict` does not have them among its bases when it runs.
SHARED_OPTIONS = ("DtypeOptions", "CallOptions")
SPECIAL = ("__call__", "__getitem__", "__matmul__")
_HEADING = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$")
_ITEM = re.compile(r"^(\*{0,2}[\w.]+): (.*)$")


def main(arguments: list[str], path: Path = PAGE) -> int:
    """Writes the page, or compares it with the one at `path`; returns the exit status."""
    text = page()
    if arguments == ["--check"]:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write("docs/client.md is out of date: run `make docs`\n")
        return EXIT_DIFFERS
    path.write_text(text, encoding="utf-8")
    return 0


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"\n## {title}\n")
        parts += [_class(name, getattr(tilewire, name)) for name in names]
    parts.append(ERRORS)
    parts += list(_errors(tilewire.TilewireError))
    parts.append("\n" + _body(inspect.getdoc(tilewire.TilewireError) or "", skip_summary=True))
    return "".join(parts)


def _class(name: str, kind: type) -> str:
    lines = [f"\n### {name}\n\n"]
    if "__init__" in vars(kind) and not name.endswith(("Options", "s")):
        made_by = vars(kind)["__init__"]
        lines.append(f"```text\n{name}{_signature(made_by)}\n```\n\n")
    lines.append(_body(inspect.getdoc(kind) or ""))
    if shared := [base for base in SHARED_OPTIONS if _keys(getattr(tilewire, base)) < _keys(kind)]:
        lines.append(f"\nAlso those of [{shared[0]}](#{shared[0].lower()}).\n")
    for member, value in _members(kind).items():
        documented = _documentation(value)
        if documented is not None and (not member.startswith("_") or member in SPECIAL):
            lines.append(f"\n#### {_spelled(name, member, value)}\n\n{_body(documented)}")
    return "".join(lines)


def _keys(kind: type) -> frozenset[str]:
    """Keys of a `TypedDict`; none for other classes."""
    return getattr(kind, "__optional_keys__", frozenset())


def _members(kind: type) -> dict[str, Any]:
    """Members of a class and of its bases in this package, those of the bases first."""
    members: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("tilewire."):
            members |= vars(base)
    return members


def _documentation(value: Any) -> str | None:
    if isinstance(value, property):
        return inspect.getdoc(value.fget)
    return inspect.getdoc(value) if inspect.isfunction(value) else None


def _spelled(owner: str, member: str, value: Any) -> str:
    holder = {
        "Client": "c",
        "Tensor": "tensor",
        "Tensors": "c.tensors",
        "Programs": "c.programs",
        "KeptProgram": "program",
    }
    subject = holder.get(owner, owner.lower())
    if isinstance(value, property):
        return f"`{subject}.{member}`"
    text = _signature(value)
    return f"`{subject}{text}`" if member == "__call__" else f"`{subject}.{member}{text}`"


def _signature(function: Any) -> str:
    parameters = list(inspect.signature(function).parameters.values())[1:]
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(plain))


def _body(docstring: str, *, skip_summary: bool = False) -> str:
    """A docstring in Markdown: its sections become lists."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if found := _HEADING.match(line):
            section = found[1]
            lines.append(f"**{'Parameters' if section == 'Args' else section}**\n")
        elif not section:
            lines.append(line)
        elif found := _ITEM.match(line.removeprefix("    ")):
            lines.append(f"- `{found[1]}`: {found[2]}")
        elif line.strip():
            lines.append(f"  {line.strip()}" if lines[-1].startswith(("- ", "  ")) else line.strip())
        else:
            lines.append("")
    if skip_summary:
        lines = lines[1:]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def _errors(kind: type[Exception]) -> Iterator[str]:
    for error in kind.__subclasses__():
        summary = (inspect.getdoc(error) or "").splitlines()[0]
        yield f"| `{error.__name__}` | `{kind.__name__}` | {summary} |\n"
        yield from _errors(error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Renders the Helm chart as `helm template` does: the part of its language that the chart uses, and no more.

Where `helm` is installed the tests compare this with it. Anything that is not known here raises.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

_TOKEN = re.compile(r"(\{\{-?)\s*(.*?)\s*(-?\}\})", re.DOTALL)
_WORD = re.compile(r'"[^"]*"|\(|\)|[^\s()]+')

Scope = Mapping[str, Any]
# Text, or an action between braces.
Node = tuple[str, str]


def merged(values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the chart with those that are given, as Helm merges them: maps key by key."""
    result = dict(values)
    for name, value in given.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


class Chart:
    """A chart in a folder.

    Args:
        folder: Folder with Chart.yaml.
    """

    def __init__(self, folder: Path) -> None:
        self.metadata = yaml.safe_load((folder / "Chart.yaml").read_text(encoding="utf-8"))
        self.values = yaml.safe_load((folder / "values.yaml").read_text(encoding="utf-8"))
        self._templates = {
            path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "templates").iterdir())
        }
        self._defined: dict[str, list[Node]] = {}
        for name, text in self._templates.items():
            if name.endswith(".tpl"):
                self._render(_nodes(text), {}, {})

    def render(self, release: str, values: Mapping[str, Any]) -> dict[str, str]:
        """Text by template's name."""
        root = {
            "Values": merged(self.values, values),
            "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
            "Chart": {key[0].upper() + key[1:]: value for key, value in self.metadata.items()},
        }
        shown = {name: text for name, text in self._templates.items() if not name.endswith(".tpl")}
        return {name: self._render(_nodes(text), root, {"$": root}) for name, text in shown.items()}

    def resources(self, release: str, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Resources that the chart makes."""
        texts = [text for name, text in self.render(release, values).items() if name.endswith(".yaml")]
        return [one for text in texts for one in yaml.safe_load_all(text) if one is not None]

    def _render(self, nodes: list[Node], dot: Any, variables: Scope) -> str:
        out: list[str] = []
        rest = iter(nodes)
        for kind, text in rest:
            if kind == "text":
                out.append(text)
                continue
            word, _, argument = text.partition(" ")
            if word == "define":
                self._defined[argument.strip('"')] = _block(rest)
            elif word == "if":
                block = _block(rest)
                out.append(self._render(block, dot, variables) if self._value(argument, dot, variables) else "")
            elif word == "with":
                block, value = _block(rest), self._value(argument, dot, variables)
                out.append(self._render(block, value, variables) if value else "")
            elif word == "range":
                block, (names, _, source) = _block(rest), argument.partition(":=")
                key, item = (name.strip() for name in names.split(","))
                for one, value in sorted(self._value(source.strip(), dot, variables).items()):
                    out.append(self._render(block, value, {**variables, key: one, item: value}))
            elif not text.startswith("/*"):
                out.append(_shown(self._value(text, dot, variables)))
        return "".join(out)

    def _value(self, expression: str, dot: Any, variables: Scope) -> Any:
        """The value of a pipeline."""
        value: Any = None
        for number, stage in enumerate(expression.split("|")):
            value = self._call(_WORD.findall(stage), dot, variables, [value] if number else [])
        return value

    def _call(self, words: list[str], dot: Any, variables: Scope, piped: list[Any]) -> Any:
        arguments: list[Any] = []
        rest = iter(words)
        for word in rest:
            if word == "(":
                inner = []
                for one in rest:
                    if one == ")":
                        break
                    inner.append(one)
                arguments.append(self._call(inner, dot, variables, []))
            else:
                arguments.append(word if not arguments else _operand(word, dot, variables))
        name, *operands = arguments
        operands += piped
        match name:
            case "toYaml":
                return yaml.safe_dump(operands[0], default_flow_style=False, sort_keys=True).rstrip("\n")
            case "toJson":
                return json.dumps(operands[0], sort_keys=True, separators=(",", ":"))
            case "sha256sum":
                return hashlib.sha256(str(operands[0]).encode()).hexdigest()
            case "nindent":
                return "\n" + "\n".join(" " * operands[0] + line for line in str(operands[1]).split("\n"))
            case "quote":
                return json.dumps(_shown(operands[0]))
            case "eq":
                return operands[0] == operands[1]
            case "not":
                return not operands[0]
            case "include":
                return self._render(self._defined[operands[0]], operands[1], variables).strip("\n")
        if operands:
            raise ValueError(f"{name} is not known here")
        return _operand(name, dot, variables)


def _operand(word: Any, dot: Any, variables: Scope) -> Any:
    if not isinstance(word, str):
        return word
    if word.startswith('"'):
        return word[1:-1]
    if word.isdecimal():
        return int(word)
    if word.startswith("$"):
        return variables[word]
    if not word.startswith("."):
        raise ValueError(f"{word} is not known here")
    # Helm's own values are reached from the root only.
    value = variables["$"] if word.startswith((".Values", ".Release", ".Chart")) else dot
    for part in filter(None, word.split(".")):
        value = value[part]
    return value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nodes(text: str) -> list[Node]:
    """Cuts a template; a dash at a brace takes the white space beside it."""
    nodes: list[Node] = []
    end, trims = 0, False
    for found in _TOKEN.finditer(text):
        piece = text[end : found.start()]
        piece = piece.lstrip() if trims else piece
        nodes.append(("text", piece.rstrip() if found[1].endswith("-") else piece))
        nodes.append(("action", found[2]))
        end, trims = found.end(), found[3].startswith("-")
    nodes.append(("text", text[end:].lstrip() if trims else text[end:]))
    return nodes


def _block(rest: Iterator[Node]) -> list[Node]:
    """The nodes up to the `end` that belongs to what was just opened."""
    depth = 1
    block: list[Node] = []
    for node in rest:
        word = node[1].partition(" ")[0] if node[0] == "action" else ""
        depth += (word in ("if", "with", "range", "define")) - (word == "end")
        if depth == 0:
            return block
        block.append(node)
    raise ValueError("a block does not end")

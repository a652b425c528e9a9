"""What was measured so far, on disk line by line, so that an interrupted tuning goes on where it was. Knows no kernel.

The first line says what the figures depend on; a journal of anything else is begun anew.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

_logger = logging.getLogger(__name__)


class Journal:
    """Figures by name, each on a line of its own as soon as it is known.

    Args:
        path: of the file; made when the first figure comes.
        identity: what figures depend on: device, driver, Triton, kernels.
    """

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        self._path = path
        self._identity = identity
        self._known: dict[str, Any] = {}
        self._is_begun = False
        if path.is_file():
            self._load()

    def __len__(self) -> int:
        return len(self._known)

    def get(self, name: str) -> Any:
        """The figure called `name`; None when there is none."""
        return self._known.get(name)

    def put(self, name: str, value: Any) -> None:
        """Keep a figure (anything that JSON has, but None)."""
        self._known[name] = value
        if not self._is_begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"identity": self._identity}) + "\n")
            self._is_begun = True
        with self._path.open("a") as file:
            file.write(json.dumps([name, value]) + "\n")

    def remove(self) -> None:
        """Forget everything, on disk too."""
        self._path.unlink(missing_ok=True)
        self._known.clear()
        self._is_begun = False

    def _load(self) -> None:
        lines = self._path.read_bytes().splitlines()
        head = _parsed(lines[0]) if lines else None
        if not isinstance(head, dict) or head.get("identity") != self._identity:
            _logger.warning("%s is of another device, driver, Triton or source: begun anew", self._path)
            return
        self._is_begun = True
        for number, line in enumerate(lines[1:], start=2):
            entry = _parsed(line)
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
                self._known[entry[0]] = entry[1]
            else:
                _logger.warning("%s:%d: not a figure: left out", self._path, number)
        if not self._path.read_bytes().endswith(b"\n"):
            with self._path.open("a") as file:
                file.write("\n")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None

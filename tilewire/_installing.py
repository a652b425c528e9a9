"""Says how packages that are missing are installed, so that it works where this package came from."""

from __future__ import annotations

from pathlib import Path


def how_to_install(extra: str) -> str:
    """Returns the command that adds an extra to this installation.

    Args:
        extra: Name of the extra, as `cli`.
    """
    root = Path(__file__).resolve().parents[1]
    # A checkout installs itself; of an installed package pip finds the extras without an index.
    source = str(root) if (root / "pyproject.toml").is_file() else "tilewire"
    return f"pip install '{source}[{extra}]'"

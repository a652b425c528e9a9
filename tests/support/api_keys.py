"""Files of API keys for tests: entries, and replacing a file as an operator should."""

from __future__ import annotations

from pathlib import Path

from tilewire.service.keys import digest_of


def entry(name: str, key: str, rest: str = "") -> str:
    """One entry; `rest` are its further lines."""
    return f'[[keys]]\nname = "{name}"\nsha256 = "{digest_of(key)}"\n{rest}\n'


def keys_file(folder: Path, *entries: str) -> Path:
    """Puts a file of these entries in place, at once; without entries, one that says that there are none."""
    path = folder / "keys.toml"
    draft = folder / "draft"
    draft.write_text("".join(entries) or "keys = []", encoding="utf-8")
    draft.chmod(0o600)
    draft.replace(path)
    return path

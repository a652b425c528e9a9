"""The base of what is found by name: without it Python would try the names 0, 1, … for `in` and `for`."""

from __future__ import annotations

from collections.abc import Iterator


class ByName:
    """Things of a server by name, which are listed by a call. Refuses what would need a wait."""

    def __contains__(self, name: object) -> bool:
        raise TypeError(self._hint("in"))

    def __iter__(self) -> Iterator[str]:
        raise TypeError(self._hint("for"))

    def _hint(self, word: str) -> str:
        kind = type(self).__name__
        listed = kind.removeprefix("Async").lower()
        return f"{word!r} cannot wait for the server with {kind}; type [one.name for one in await c.{listed}()]"

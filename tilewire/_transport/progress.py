"""A progress bar of one line for long transfers, on a terminal only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

# Shorter transfers end before anybody would read a bar.
_PATIENCE_S = 1.0
_INTERVAL_S = 0.1
_WIDTH = 30


class ProgressBar:
    """Draws how much of a transfer is done. A context manager: the line disappears at the end.

    Args:
        title: Text before the bar.
        is_shown: Whether to draw at all; None draws where the stream is a terminal and the transfer is long.
        stream: Where it is drawn; standard error by default.
    """

    def __init__(self, title: str, is_shown: bool | None = None, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._is_possible = self._stream.isatty() if is_shown is None else is_shown
        self._patience_s = _PATIENCE_S if is_shown is None else 0.0
        self._began_s = self._drawn_s = time.monotonic()
        self._is_drawn = False

    def __call__(self, done: int, total: int) -> None:
        """Draws the state: bytes done of bytes in all."""
        now_s = time.monotonic()
        if not self._is_possible or now_s - self._began_s < self._patience_s:
            return
        if self._is_drawn and now_s - self._drawn_s < _INTERVAL_S and done < total:
            return
        share = done / total if total else 1.0
        filled = round(share * _WIDTH)
        rate = done / max(now_s - self._began_s, 1e-9) / 1e6
        bar = "█" * filled + "░" * (_WIDTH - filled)
        self._stream.write(f"\r{self._title} {bar} {share:4.0%} of {total / 1e6:,.0f} MB, {rate:,.0f} MB/s ")
        self._stream.flush()
        self._is_drawn, self._drawn_s = True, now_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

"""Standard output of a command: characters that its encoding lacks, and output that cannot be written."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from pathlib import Path

# Characters of our texts, and what is printed for them where the encoding lacks them.
_STAND_INS = {"×": "x", "…": "...", "→": "->", "–": "-", "✓": "ok", "✗": "x"}
_HANDLER = "tilewire.stand_in"
# Error handlers that Python chooses by itself; the second in the locale C, where it does not use UTF-8 all the same.
_OF_PYTHON = ("strict", "surrogateescape")
# Errors of a write that are no fault of the program.
_UNWRITABLE = (errno.ENOSPC, errno.EFBIG, errno.EIO)


def accept_all_characters() -> None:
    """Lets standard output print what its encoding has, and stand-ins for the rest.

    An error handler that the user chose by PYTHONIOENCODING stays.
    """
    codecs.register_error(_HANDLER, _stand_in)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _OF_PYTHON:
        sys.stdout.reconfigure(errors=_HANDLER)


def has_all_characters() -> bool:
    """Whether the encoding of standard output has every character."""
    return codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")


def is_unwritable(error: OSError) -> bool:
    """Whether the system could not write what was printed, as on a full disk."""
    return error.errno in _UNWRITABLE and error.filename is None


def discard() -> None:
    """Sends standard output nowhere: Python would try to write what is left when it ends."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _stand_in(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_STAND_INS.get(character, "?") for character in lacking), error.end

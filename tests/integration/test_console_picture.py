"""A recording of a real server's answers makes the same page as the server."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.browser import chromium
from tests.support.console_picture import take
from tests.support.console_recording import PATHS, record

pytestmark = pytest.mark.slow

SECONDS = 8


def test_a_recording_is_drawn(tmp_path: Path) -> None:
    with chromium():  # skips where there is none
        pass
    recording, picture = tmp_path / "run.json.gz", tmp_path / "console.png"
    record(recording, "cpu", SECONDS)
    with gzip.open(recording, "rt", encoding="utf-8") as file:
        frames = json.load(file)["frames"]
    assert len(frames) == SECONDS
    assert all(frame.keys() == set(PATHS) for frame in frames)
    assert "tilewire_kernel_bytes_total{" in frames[-1]["/metrics"]["body"]
    take(picture, recording, "dark", is_phone=True, seconds=SECONDS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000

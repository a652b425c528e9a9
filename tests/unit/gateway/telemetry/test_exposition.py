"""`/metrics` while a process is only just making its file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tilewire.service.gateway.telemetry.metrics import READ_AGAIN_S, expose


def test_a_file_in_the_making_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "counter_1.db"
    file.touch()

    async def run() -> tuple[bytes, str]:
        scrape = asyncio.ensure_future(expose(str(tmp_path), ""))
        await asyncio.sleep(2 * READ_AGAIN_S)
        assert not scrape.done()
        file.write_bytes((8).to_bytes(4, "little") + bytes(4092))
        return await scrape

    body, content_type = asyncio.run(run())
    assert content_type.startswith("text/plain")
    assert b"Error" not in body

"""nginx with the configuration of `deploy/nginx`: only addresses, the port and its folder are a test's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.support.programs import find_program, free_port, running

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "nginx" / "nginx.conf"


@contextlib.contextmanager
def proxying(folder: Path, addresses: Sequence[str], *changes: tuple[str, str]) -> Iterator[str]:
    """Runs nginx in front of these two addresses, `name:port`; yields its own address.

    Args:
        folder: Folder of its configuration and log.
        addresses: Addresses of both.
        changes: Other text of the configuration that this test replaces, and what takes its place.
    """
    text = CONFIG.read_text(encoding="utf-8")
    port = free_port()
    places = {"listen 8080": f"listen 127.0.0.1:{port}", "/tmp/tilewire-nginx": str(folder / "nginx")}
    places |= {f"replica-{number}:8000": address for number, address in enumerate(addresses, 1)}
    places |= dict(changes)
    for place, ours in places.items():
        assert place in text
        text = text.replace(place, ours)
    (folder / "nginx").mkdir(parents=True)
    (folder / "nginx.conf").write_text(text, encoding="utf-8")
    options = "daemon off;" + (" user root;" if os.geteuid() == 0 else "")
    command = [find_program("nginx"), "-c", str(folder / "nginx.conf"), "-p", str(folder), "-g", options]
    with running(command, folder / "nginx.log", port):
        yield f"http://127.0.0.1:{port}"

"""The image's files: hadolint accepts the Dockerfile, its parts do what the image says of them. `make image-test` builds it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.live_server import LiveServer
from tests.support.programs import find_program, free_port

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
IMAGE = ROOT / "deploy" / "image"


def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run(
        [find_program("hadolint"), "Dockerfile"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        word for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]
    ]
    assert len(copied) > 5
    for path in copied:
        assert (ROOT / path).exists(), path
        assert any(path == one or path.startswith(f"{one}/") for one in kept), path


def test_it_runs_as_nobody_on_a_read_only_root() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)[-1] == "10001:10001"
    assert 'VOLUME ["/tmp", "/var/cache/tilewire"]' in DOCKERFILE


@pytest.mark.parametrize(
    ("given", "port"),
    [({}, ""), ({"PORT": "8080"}, "8080"), ({"PORT": "8080", "TILEWIRE_PORT": "9000"}, "9000")],
    ids=["neither", "as KServe says it", "our own wins"],
)
def test_the_entry_point_takes_the_port_and_becomes_the_service(
    tmp_path: Path, given: dict[str, str], port: str
) -> None:
    command = tmp_path / "tilewire"
    command.write_text('#!/bin/sh\necho "$$ ${TILEWIRE_PORT:-} $*"\n')
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRITON_CACHE_DIR": str(tmp_path / "cache"), **given}
    with subprocess.Popen(
        [IMAGE / "entrypoint.sh", "serve", "--device", "cpu"],
        env=env,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        said = process.stdout.read().decode()
    assert said.split() == [str(process.pid), *([port] if port else []), "serve", "--device", "cpu"]


def test_the_entry_point_brings_kernels_into_the_cache(tmp_path: Path) -> None:
    cache, ours, entry = (
        tmp_path / "cache",
        tmp_path / "image" / "kernels",
        tmp_path / "image" / "bin" / "entrypoint.sh",
    )
    for path, text in ((ours / "new" / "a", "new"), (ours / "known" / "b", "image"), (ours / "cut" / "c", "whole")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (cache / "known").mkdir(parents=True)
    (cache / "known" / "b").write_text("compiled here")
    (cache / "cut.part").mkdir()
    (cache / "cut.part" / "c").write_text("wh")
    entry.parent.mkdir()
    shutil.copy(IMAGE / "entrypoint.sh", entry)
    command = tmp_path / "tilewire"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRITON_CACHE_DIR": str(cache)}
    for _ in range(2):
        subprocess.run([entry], env=env, check=True)
        found = {path.relative_to(cache).as_posix(): path.read_text() for path in cache.rglob("*") if path.is_file()}
        assert found == {"new/a": "new", "known/b": "compiled here", "cut/c": "whole"}


def test_the_entry_point_fills_a_cache_that_is_not_there_at_once(tmp_path: Path) -> None:
    cache, image = tmp_path / "volume" / "cache", tmp_path / "image"
    for name in ("one", "two"):
        (image / "kernels" / name).mkdir(parents=True)
        (image / "kernels" / name / "kernel").write_text(name)
    (image / "kernels" / "index.json").write_text("{}")
    # What a start that was cut short left behind.
    (tmp_path / "volume" / "cache.part" / "one").mkdir(parents=True)
    (image / "bin").mkdir()
    shutil.copy(IMAGE / "entrypoint.sh", image / "bin")
    command = tmp_path / "tilewire"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRITON_CACHE_DIR": str(cache)}
    subprocess.run([image / "bin" / "entrypoint.sh"], env=env, check=True)
    found = {path.relative_to(cache).as_posix(): path.read_text() for path in cache.rglob("*") if path.is_file()}
    assert found == {"one/kernel": "one", "two/kernel": "two", "index.json": "{}"}
    assert [path.name for path in cache.parent.iterdir()] == ["cache"]


@pytest.mark.parametrize("variable", ["PORT", "TILEWIRE_PORT", "TILEWIRE_METRICS_PORT"])
def test_the_health_check_is_0_while_it_lives(server: LiveServer, variable: str) -> None:
    assert health({variable: str(server.port)}) == 0
    assert health({variable: str(free_port())}) == 1


def test_the_health_check_speaks_tls_where_the_service_does(server: LiveServer) -> None:
    assert health({"PORT": str(server.port), "TILEWIRE_TLS_CERTIFICATE": "chain.pem"}) == 1


@pytest.mark.parametrize(
    ("host", "asked"),
    [
        (None, "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("::", "::1"),
        ("::1", "::1"),
        ("localhost", "127.0.0.1"),
    ],
)
@pytest.mark.parametrize("prefix", ["TILEWIRE", "TILEWIRE_METRICS"])
def test_the_health_check_asks_where_the_service_listens(host: str | None, asked: str, prefix: str) -> None:
    family = socket.AF_INET6 if ":" in asked else socket.AF_INET
    with alive_at(asked, family) as port:
        env = {f"{prefix}_PORT": str(port)} | ({} if host is None else {f"{prefix}_HOST": host})
        assert health(env) == 0


class _Alive(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 404)
        self.end_headers()


@contextlib.contextmanager
def alive_at(address: str, family: socket.AddressFamily) -> Iterator[int]:
    """A stand-in that is alive at one address; its port."""

    class Server(ThreadingHTTPServer):
        address_family = family

    with Server((address, 0), _Alive) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def health(env: dict[str, str]) -> int:
    command = [sys.executable, "-I", str(IMAGE / "health.py")]
    return subprocess.run(command, env=env, capture_output=True, check=False).returncode

"""Every example runs against a real server, and leaves nothing there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.live_server import LiveServer, path_with

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted([*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.ipynb")])
# What makes an example small enough for a test.
SMALLER = {"search.py": ("--items", "5000")}


def source_of(path: Path) -> str:
    if path.suffix == ".py":
        return path.read_text(encoding="utf-8")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_runs(path: Path, server: LiveServer, client: httpx.Client, tmp_path: Path) -> None:
    before = {entry["name"] for entry in client.get("/v1/tensors").json()}
    script = tmp_path / "example.py"
    script.write_text(source_of(path), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": path_with(ROOT), "TILEWIRE_URL": server.url}
    command = [
        sys.executable,
        str(script),
        *([server.url] if path.suffix == ".py" else []),
        *SMALLER.get(path.name, ()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert {entry["name"] for entry in client.get("/v1/tensors").json()} == before


def test_the_list_of_examples_is_whole() -> None:
    listed = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    assert all(f"[{path.name}]({path.name})" in listed for path in EXAMPLES)

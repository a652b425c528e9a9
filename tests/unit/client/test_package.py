"""The package from outside: what it exports, what it imports, and what its command says without the server."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tilewire
from tests.support.async_client import WRITTEN, write

# Bases of what is public: nobody needs their names.
BASES = {"CallOptions", "DtypeOptions", "Recorded", "Resident"}
BASES |= {"TensorCalls", "ProgramCalls", "AsyncTensorCalls", "AsyncProgramCalls"}


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


def test_all_is_complete() -> None:
    loaded = {name: getattr(tilewire, name) for name in tilewire.__all__}
    homes = {value.__module__ for value in loaded.values() if hasattr(value, "__module__")}
    public = {
        name
        for home in homes & set(sys.modules)
        if home.startswith("tilewire.")
        for name, value in vars(sys.modules[home]).items()
        if inspect.isclass(value) and value.__module__ == home and not name.startswith("_")
    }
    assert sorted(set(tilewire.__all__)) == sorted(tilewire.__all__) == dir(tilewire)
    assert public - BASES <= set(loaded)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        tilewire.Cleint  # noqa: B018


def test_both_clients_have_the_same_surface() -> None:
    def surface(kind: type) -> dict[str, list[str]]:
        methods = {name: value for name, value in vars(kind).items() if not name.startswith("_") or name == "__init__"}
        return {
            name.replace("aclose", "close"): list(inspect.signature(value).parameters)
            for name, value in methods.items()
        }

    assert surface(tilewire.Client) == surface(tilewire.AsyncClient)


@pytest.mark.parametrize(("target", "source"), WRITTEN.items(), ids=lambda path: path.name)
def test_the_asyncio_client_is_written_from_the_blocking_one(target: Path, source: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-"], input=write(source), capture_output=True, text=True, check=True
    ).stdout
    assert shown == target.read_text(encoding="utf-8"), "run python -m tests.support.async_client"


def test_the_client_imports_httpx_and_numpy_only() -> None:
    done = python("import sys, tilewire; print({'msgspec', 'ml_dtypes', 'service', 'torch'} & set(sys.modules))")
    assert done.stdout.strip() == "set()", done.stderr


def test_bfloat16_without_ml_dtypes_says_what_to_install() -> None:
    code = """
import sys
sys.modules["ml_dtypes"] = None
from tilewire._arrays.host import from_safetensors
header = b'{"out":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}'
from_safetensors(bytearray(len(header).to_bytes(8, "little") + header + b"xx"))["out"].numpy()
"""
    assert "pip install ml_dtypes" in python(code).stderr

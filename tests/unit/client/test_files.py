"""Tensors from files and to files, and the bar that shows how far they are."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import tilewire
from tests.unit.client.speaking_server import SpeakingServer, on_a_socket
from tilewire._arrays.files import Destination, replacing
from tilewire._transport.progress import ProgressBar

X = np.arange(12, dtype=np.float32).reshape(3, 4)


@pytest.fixture
def url(server: SpeakingServer) -> Iterator[str]:
    with on_a_socket(server) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[tilewire.Client]:
    with tilewire.Client(url) as client:
        yield client


def test_npy_and_memmap(client: tilewire.Client, server: SpeakingServer, tmp_path: Path) -> None:
    path = tmp_path / "weights.npy"
    np.save(path, X)
    (tensor,) = client.put_file(path)
    assert (tensor.name, tensor.shape) == ("weights", (3, 4))
    client.put("again", np.load(path, mmap_mode="r"))
    np.testing.assert_array_equal(server.tensors["again"], X)


def test_safetensors_and_npz(client: tilewire.Client, server: SpeakingServer, tmp_path: Path) -> None:
    tensors = {"w1": X, "w2": X.astype(ml_dtypes.bfloat16)}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert {tensor.name for tensor in client.put_file(tmp_path / "model.safetensors")} == {"model/w1", "model/w2"}
    assert server.tensors["model/w2"].dtype == ml_dtypes.bfloat16
    np.savez(tmp_path / "one.npz", only=X)
    client.put_file(str(tmp_path / "one.npz"), "named")
    np.testing.assert_array_equal(server.tensors["named"], X)


def test_a_file_goes_to_the_devices_that_are_named(
    client: tilewire.Client, server: SpeakingServer, tmp_path: Path
) -> None:
    np.save(tmp_path / "w.npy", X)
    client.put_file(tmp_path / "w.npy", placement="shard", axis=-2)
    assert dict(server.requests[-1].url.params) == {"placement": "shard", "axis": "-2"}


def test_files_that_are_none(client: tilewire.Client, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.npy, \.npz, \.safetensors"):
        client.put_file(tmp_path / "x.txt")
    with pytest.raises(FileNotFoundError):
        client.put_file(tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"\.npy, \.safetensors"):
        client.get_file("w", tmp_path / "x.txt")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        (
            {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]},
            "w: dtype C64 is none that this client knows; it knows F16",
        ),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 16]}, "span its shape"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}, "span its shape"),
        ({"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}, "smaller"),
        ({"dtype": "F32", "data_offsets": [0, 16]}, "not understood"),
        ({"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}, "not understood"),
        (None, "not understood"),
    ],
)
def test_damaged_safetensors_are_named(client: tilewire.Client, tmp_path: Path, entry: object, what: str) -> None:
    header = json.dumps({"w": entry}).encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(ValueError, match=rf"w\.safetensors: .*{what}"):
        client.put_file(path)


@pytest.mark.parametrize("header", [b"an npy?", b"\xff\xfe", b"{"])
def test_a_header_that_is_no_json_is_named(client: tilewire.Client, tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"w\.safetensors: not safetensors: its header is not understood"):
        client.put_file(path)


def test_a_dtype_that_a_file_cannot_say_is_named(client: tilewire.Client, tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", X.astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match=r"w\.npy: dtype .*V2 cannot be sent"):
        client.put_file(tmp_path / "w.npy")


def test_into_a_file(client: tilewire.Client, tmp_path: Path) -> None:
    client.put("w", X)
    path = client.get_file("w", tmp_path / "w.safetensors")
    (got,) = safetensors.numpy.load_file(path).values()
    np.testing.assert_array_equal(got, X)
    client.put("w", X + 1)
    client.get_file("w", path)
    (got,) = safetensors.numpy.load_file(path).values()
    np.testing.assert_array_equal(got, X + 1)


def test_a_failed_download_leaves_the_old_file(client: tilewire.Client, tmp_path: Path) -> None:
    path = tmp_path / "w.npy"
    np.save(path, X)
    with pytest.raises(tilewire.NotFound):
        client.get_file("missing", path)
    np.testing.assert_array_equal(np.load(path), X)
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.npy"]


@pytest.mark.parametrize("path", ["missing/w.npy", "folder.npy"])
def test_a_file_that_cannot_be_written(client: tilewire.Client, url: str, tmp_path: Path, path: str) -> None:
    (tmp_path / "folder.npy").mkdir()
    client.put("w", X)
    with pytest.raises(OSError, match=Path(path).name) as raised:
        client.get_file("w", tmp_path / path)
    assert ".part" not in str(raised.value)
    np.testing.assert_array_equal(client.get("w"), X)

    async def fetch() -> None:
        async with tilewire.AsyncClient(url) as client:
            with pytest.raises(OSError, match=Path(path).name):
                await client.get_file("w", tmp_path / path)

    asyncio.run(fetch())
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder.npy"]


def test_the_disk_has_room_for_a_file_before_it_is_received(tmp_path: Path) -> None:
    with Destination(tmp_path / "w.npy") as into:
        view = into.make_buffer(2**20)
        view[-1] = 7
        assert into.finish(view).stat().st_blocks * 512 >= 2**20
    assert (tmp_path / "w.npy").read_bytes()[-1] == 7


def test_two_that_write_one_file_at_once_each_write_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "w.npy"
    with Destination(path) as first, Destination(path) as second, replacing(path) as third:
        bodies = [(into, into.make_buffer(2**20)) for into in (first, second)]
        third.write_bytes(b"3")
        for (into, body), byte in zip(bodies, (b"1", b"2"), strict=True):
            body[:] = byte * 2**20
            assert into.finish(body).read_bytes() == byte * 2**20
    assert path.read_bytes() == b"3"
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.npy"]


def test_a_place_that_is_lost_during_the_download_is_named(tmp_path: Path) -> None:
    path = tmp_path / "w.npy"

    def receive() -> None:
        with Destination(path) as into:
            view = into.make_buffer(8)
            path.mkdir()
            into.finish(view)

    with pytest.raises(OSError, match=r"w\.npy") as raised:
        receive()
    assert ".part" not in str(raised.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["w.npy"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_the_share_and_disappears() -> None:
    stream = Terminal()
    with ProgressBar("w", is_shown=True, stream=stream) as bar:
        bar(50_000_000, 100_000_000)
    assert "w " in stream.getvalue()
    assert " 50% of 100 MB" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(("stream", "is_shown"), [(io.StringIO(), None), (Terminal(), None), (Terminal(), False)])
def test_no_bar_without_a_terminal_or_for_short_transfers(stream: io.StringIO, is_shown: bool | None) -> None:
    with ProgressBar("w", is_shown, stream) as bar:
        bar(1, 2)
        bar(2, 2)
    assert stream.getvalue() == ""

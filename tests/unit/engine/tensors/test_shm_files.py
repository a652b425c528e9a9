"""Which keys may be opened, and what reads and writes do when the object changes under them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.descriptors import num_opened, open_descriptors
from tilewire.service.engine.tensors.shm_files import SharedFile, file_name
from tilewire.service.errors import InvalidRequest


def test_a_key_is_found_as_shm_open_finds_it() -> None:
    assert file_name("x", "") == file_name("/x", "") == file_name("//x", "") == "x"
    assert file_name("/tw-1", "/tw-") == file_name("tw-1", "tw-") == "tw-1"


@pytest.mark.parametrize(
    "key", ["", "/", "..", "/..", ".", "a/b", "/../etc/passwd", "a\0b", "x" * 256, "é" * 128, "/dev/shm/x"]
)
def test_what_is_no_key(key: str) -> None:
    with pytest.raises(InvalidRequest, match="key"):
        file_name(key, "")


@given(st.text(max_size=300), st.sampled_from(["", "tw-", "/tw-"]))
def test_whatever_is_allowed_is_one_file_under_the_prefix(key: str, prefix: str) -> None:
    try:
        name = file_name(key, prefix)
    except InvalidRequest:
        return
    assert name.startswith(prefix.lstrip("/"))
    assert Path("/folder") / name == Path("/folder", name)
    assert (Path("/folder") / name).parent == Path("/folder")
    assert name not in (".", "..")


def test_links_pipes_folders_and_nothing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = open_descriptors()
    for key in ("link", "folder", "pipe", "absent", "a" * 255):
        with pytest.raises(InvalidRequest, match="key"):
            SharedFile.open(key, "", tmp_path)
    assert num_opened(before) == 0
    file = SharedFile.open("/real", "", tmp_path)
    assert (file.nbytes, file.is_writable) == (10, True)
    file.close()


def test_an_error_names_the_key_and_no_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as raised:
        SharedFile.open("absent", "", tmp_path)
    assert "absent" in raised.value.detail
    assert str(tmp_path) not in raised.value.detail


def test_reads_and_writes_do_not_reach_beyond_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(bytes(range(100)))
    file = SharedFile.open("object", "", tmp_path)
    buffer = bytearray(50)
    file.read(memoryview(buffer), 50)
    assert buffer == bytes(range(50, 100))
    os.truncate(path, 60)
    with pytest.raises(InvalidRequest, match="cut"):
        file.read(memoryview(buffer), 50)
    with pytest.raises(InvalidRequest, match="cut"):
        file.write(memoryview(buffer), 50)
    assert path.stat().st_size == 60
    file.write(memoryview(b"abc"), 57)
    assert path.read_bytes()[50:] == bytes(range(50, 57)) + b"abc"
    file.close()


def test_an_object_that_says_that_it_is_not_to_be_written(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(b"x")
    path.chmod(0o400)
    file = SharedFile.open("object", "", tmp_path)
    assert not file.is_writable
    file.close()

"""The folder of `--store`: versions in one order over several writers, complete files only, and nothing but our own."""

from __future__ import annotations

import errno
import json
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.clock import Clock
from tilewire.service.engine.tensors.folder import (
    DELETED_S,
    MAX_REPLACED,
    MAX_VERSION,
    REPLACED_S,
    TEMPORARY_S,
    Base,
    Damaged,
    StoredVersion,
    StoreFolder,
    Written,
    bucket_of,
    stem_of,
)
from tilewire.service.errors import PreconditionFailed, StoreFull, Unavailable
from tilewire.service.match import ANY
from tilewire.service.ops.op import TensorType

KIND = TensorType("float32", (2, 3))
VALUES = np.arange(6, dtype=np.float32).reshape(2, 3)
W = "layers/w.1"


def headed(header: dict[str, Any]) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text


def file_of(array: np.ndarray) -> int:
    fd = os.memfd_create("tests")
    os.write(fd, array.tobytes())
    return fd


@pytest.fixture
def source() -> Iterator[int]:
    fd = file_of(VALUES)
    yield fd
    os.close(fd)


@pytest.fixture
def folder(tmp_path: Path) -> StoreFolder:
    folder = StoreFolder(tmp_path)
    folder.create()
    return folder


def make_room(_stored: StoredVersion) -> int:
    return os.memfd_create("tests")


def load(folder: StoreFolder, name: str, have: int = 0) -> tuple[StoredVersion | None, np.ndarray | None]:
    stored, fd = folder.load(name, have, make_room)
    if fd < 0:
        return stored, None
    array = np.frombuffer(os.pread(fd, 2**20, 0), np.float32)
    os.close(fd)
    return stored, array


def version_of(file: str) -> int:
    return int(file.removesuffix(".safetensors").rpartition("@")[2])


def entries(path: Path, name: str) -> list[str]:
    return sorted(one.name for one in (path / f"{bucket_of(name):02x}").iterdir())


def test_what_was_written_is_read(folder: StoreFolder, source: int, tmp_path: Path) -> None:
    assert load(folder, W)[0] is None
    written = folder.write(W, KIND, "single", source)
    assert not written.replaced
    assert written.is_last
    stored, array = load(folder, W)
    assert stored is not None
    assert stored[:3] == (written.version, KIND, "single")
    assert array is not None
    assert np.array_equal(array, VALUES.reshape(-1))
    assert load(folder, W, have=written.version) == (stored, None)
    # Others read it, too.
    (file,) = entries(tmp_path, W)
    assert file == f"layers+w.1@{written.version}.safetensors"
    assert np.array_equal(load_file(tmp_path / f"{bucket_of(W):02x}" / file)[W], VALUES)


def test_versions_of_a_name_follow_one_another_and_begin_with_the_time(tmp_path: Path, source: int) -> None:
    clock = Clock(1_000.0)
    folder = StoreFolder(tmp_path, clock)
    folder.create()
    assert [folder.write(W, KIND, None, source).version for _ in range(3)] == [10**9, 10**9 + 1, 10**9 + 2]
    deleted = folder.delete(W)
    assert deleted is not None
    assert deleted.version == 10**9 + 3
    assert folder.delete(W) is None
    last = load(folder, W)[0]
    assert last is not None
    assert last.type is None
    again = folder.write(W, KIND, None, source)
    assert (again.version, again.replaced) == (10**9 + 4, False)


@pytest.mark.parametrize(
    "name", ["a", ".", "-", ".hidden", "x" * 255, "/".join("yz" * 64), "program:scores", "__metadata__"]
)
def test_every_name_has_its_own_files(folder: StoreFolder, source: int, name: str, tmp_path: Path) -> None:
    folder.write(name, KIND, None, source)
    for other in ("b", "..x", "x" * 254, "/".join("yz" * 63), "program"):
        assert load(folder, other)[0] is None
    stored = load(folder, name)[0]
    assert stored is not None
    assert stored.type == KIND
    assert len(os.fsencode(f"{stem_of(name)}@{MAX_VERSION}.safetensors")) <= 255
    assert all(one.parent.parent == tmp_path for one in tmp_path.glob("*/*"))


def test_conditions_are_about_the_version_before(folder: StoreFolder, source: int) -> None:
    for match in (ANY, (1,)):
        with pytest.raises(PreconditionFailed):
            folder.write(W, KIND, None, source, match)
    first = folder.write(W, KIND, None, source)
    second = folder.write(W, KIND, None, source, (first.version,))
    assert second.replaced
    with pytest.raises(PreconditionFailed):
        folder.delete(W, (first.version,))
    assert folder.delete(W, (1, second.version)) is not None
    with pytest.raises(PreconditionFailed):
        folder.write(W, KIND, None, source, ANY)


class Stalls(tuple[int, ...]):
    """A condition on some version that takes its time at first: meanwhile others write."""

    __slots__ = ()
    meanwhile: ClassVar[list[Callable[[], None]]] = []

    def __contains__(self, version: object) -> bool:
        while self.meanwhile:
            self.meanwhile.pop()()
        return super().__contains__(version)


class Whatever(Stalls):
    """As `Stalls`; it always holds."""

    __slots__ = ()

    def __contains__(self, version: object) -> bool:
        super().__contains__(version)
        return True


@pytest.mark.parametrize(("num_others", "seconds"), [(1, 0.0), (MAX_REPLACED + 2, 0.0), (3, 2 * REPLACED_S)])
@pytest.mark.parametrize("condition", [Stalls, Whatever])
def test_a_version_that_others_gave_meanwhile_is_not_given_again(
    tmp_path: Path, source: int, condition: type[Stalls], num_others: int, seconds: float
) -> None:
    """The writer has looked at the folder, and stalls. Others give the next versions; the first of them were removed, too."""
    clock = Clock(time.time())
    folder, other = StoreFolder(tmp_path, clock), StoreFolder(tmp_path, clock)
    folder.create()
    first = folder.write(W, KIND, None, source)
    given: list[int] = []

    def write() -> None:
        given.extend(other.write(W, KIND, None, source).version for _ in range(num_others))
        clock.now_s += seconds
        other.clean(bucket_of(W))

    Stalls.meanwhile.append(write)
    if condition is Whatever:
        written = folder.write(W, KIND, None, source, Whatever((first.version,)))
        assert (written.version, written.is_last) == (given[-1] + 1, True)
    else:
        # It does not hold any more.
        with pytest.raises(PreconditionFailed):
            folder.write(W, KIND, None, source, Stalls((first.version,)))
    assert len(given) == num_others
    stored, _ = load(folder, W)
    assert stored is not None
    assert stored.version == given[-1] + (condition is Whatever)
    assert len({version_of(one) for one in entries(tmp_path, W)}) == len(entries(tmp_path, W)) <= MAX_REPLACED + 1
    assert not list(tmp_path.glob("*/*.tmp"))


def test_a_slow_writer_that_nobody_overtook_is_no_mistake(tmp_path: Path, source: int) -> None:
    clock = Clock(time.time())
    folder = StoreFolder(tmp_path, clock)
    folder.create()
    first = folder.write(W, KIND, None, source)
    Stalls.meanwhile.append(lambda: setattr(clock, "now_s", clock.now_s + 2 * REPLACED_S))
    written = folder.write(W, KIND, None, source, Stalls((first.version,)))
    assert (written.version, written.is_last) == (first.version + 1, True)


class Interrupted(Clock):
    """A clock that somebody else uses the time of the first look at it."""

    def __init__(self, now_s: float, meanwhile: Callable[[], object]) -> None:
        super().__init__(now_s)
        self.waiting = [meanwhile]

    def __call__(self) -> float:
        while self.waiting:
            self.waiting.pop()()
        return super().__call__()


@pytest.mark.parametrize("ahead_s", [-0.5, 0.0, 1e-6, 0.5])
def test_of_two_writers_of_a_new_name_one_is_first(tmp_path: Path, source: int, ahead_s: float) -> None:
    """Both have looked at the folder and found nothing; their clocks differ."""
    other = StoreFolder(tmp_path, Clock(1000.0 + ahead_s))
    other.create()
    given: list[Written] = []

    def folder() -> StoreFolder:
        for one in tmp_path.glob("*/*"):
            one.unlink()
        given.clear()
        return StoreFolder(tmp_path, Interrupted(1000.0, lambda: given.append(other.write(W, KIND, None, source))))

    with pytest.raises(PreconditionFailed):
        folder().write(W, KIND, None, source, Base(0))
    (before,) = given
    stored, _ = load(other, W)
    assert stored is not None
    assert stored.version == before.version
    assert len(entries(tmp_path, W)) == 1

    # Without a condition both are changes of which one came after the other.
    after = folder().write(W, KIND, None, source)
    (before,) = given
    assert not before.replaced
    if abs(ahead_s) < 1e-3:
        assert after == Written(before.version + 1, True, True)
    else:
        assert after == Written(10**9, False, ahead_s < 0)


def test_writers_at_once_get_versions_in_one_order(tmp_path: Path) -> None:
    """Each writer has a folder object of its own, as each host has."""
    versions: list[tuple[int, int]] = []
    deleted: list[int] = []

    def work(writer: int) -> None:
        folder = StoreFolder(tmp_path)
        folder.create()
        for turn in range(10):
            value = 10 * writer + turn
            fd = file_of(np.full(6, value, np.float32))
            versions.append((folder.write(W, KIND, None, fd).version, value))
            os.close(fd)
            if (written := folder.delete(W)) is not None:
                deleted.append(written.version)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [version for version, _ in versions] + deleted
    assert len(set(numbers)) == len(numbers)
    # Nothing is deleted twice: before each deletion stands an upload.
    writes = {version for version, _ in versions}
    for number in deleted:
        assert number - 1 in writes
    stored, array = load(StoreFolder(tmp_path), W)
    assert stored is not None
    assert stored.version == max(numbers)
    if array is not None:
        assert array[0] == dict(versions)[stored.version]
    assert not list(tmp_path.glob("*/*.tmp"))
    assert len(list(tmp_path.glob("*/*"))) <= MAX_REPLACED + 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "damaged"),
        (b"\xff" * 64, "header of"),
        ((16).to_bytes(8, "little") + b'{"__metadata__":', "damaged"),
        ((2).to_bytes(8, "little") + b"{}", "of another name"),
        ((2).to_bytes(8, "little") + b"[]", "damaged"),
        ((20_000).to_bytes(8, "little") + b"[" * 10_000 + b"]" * 10_000, "damaged"),
        (
            headed({"__metadata__": {"name": W}, W: {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}),
            "not served",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    folder: StoreFolder, source: int, tmp_path: Path, content: bytes, words: str
) -> None:
    version = folder.write(W, KIND, None, source).version
    place = tmp_path / f"{bucket_of(W):02x}" / f"{stem_of(W)}@{version + 1}.safetensors"
    place.write_bytes(content)
    with pytest.raises(Damaged, match=words):
        load(folder, W)[0]
    # Whoever writes the name again mends it.
    written = folder.write(W, KIND, None, source)
    assert written.version == version + 2
    stored = load(folder, W)[0]
    assert stored is not None
    assert stored.version == version + 2


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_damaged(folder: StoreFolder, source: int, tmp_path: Path, change: int) -> None:
    folder.write(W, KIND, None, source)
    (file,) = (tmp_path / f"{bucket_of(W):02x}").iterdir()
    os.truncate(file, file.stat().st_size + change)
    with pytest.raises(Damaged, match="bytes instead of"):
        load(folder, W)


def test_what_is_no_file_is_passed_over(folder: StoreFolder, source: int, tmp_path: Path) -> None:
    version = folder.write(W, KIND, None, source).version
    bucket, stem = tmp_path / f"{bucket_of(W):02x}", stem_of(W)
    os.mkfifo(bucket / f"{stem}@{version + 1}.safetensors")
    (bucket / f"{stem}@{version + 2}.safetensors").mkdir()
    (bucket / f"{stem}@{version + 3}.safetensors").symlink_to("/etc/passwd")
    (bucket / f"{stem}@{MAX_VERSION + 1}.safetensors").write_bytes(b"")
    (bucket / f"{stem}@0{version}.safetensors").write_bytes(b"")
    stored, array = load(folder, W)
    assert stored is not None
    assert stored.version == version
    assert array is not None
    assert folder.last_versions(bucket_of(W), [stem]) == {stem: version}
    assert folder.write(W, KIND, None, source).version == version + 4


def test_a_name_without_a_version_left_is_refused(folder: StoreFolder, source: int, tmp_path: Path) -> None:
    folder.write(W, KIND, None, source)
    (tmp_path / f"{bucket_of(W):02x}" / f"{stem_of(W)}@{MAX_VERSION}.safetensors").write_bytes(b"")
    with pytest.raises(Unavailable, match="leaves no version"):
        folder.write(W, KIND, None, source)


def test_replaced_versions_old_deletions_and_left_files_are_removed(tmp_path: Path, source: int) -> None:
    clock = Clock(time.time())
    folder = StoreFolder(tmp_path, clock)
    folder.create()
    for _ in range(MAX_REPLACED + 5):
        folder.write(W, KIND, None, source)
    assert len(entries(tmp_path, W)) == MAX_REPLACED + 1
    left = tmp_path / f"{bucket_of(W):02x}" / "@abc.tmp"
    left.write_bytes(b"half")
    folder.clean(bucket_of(W))
    assert len(entries(tmp_path, W)) == MAX_REPLACED + 2
    clock.now_s += REPLACED_S + 1
    folder.clean(bucket_of(W))
    assert len(entries(tmp_path, W)) == 2
    folder.delete(W)
    clock.now_s += TEMPORARY_S
    folder.clean(bucket_of(W))
    assert not left.exists()
    assert len(entries(tmp_path, W)) == 1
    clock.now_s += DELETED_S
    folder.clean(bucket_of(W))
    assert entries(tmp_path, W) == []
    # A new life of the name has versions behind those of the one before.
    last = folder.write(W, KIND, None, source).version
    assert last > (time.time() + DELETED_S) * 1e6


def test_a_change_that_nobody_awaits_any_more_is_not_made(folder: StoreFolder, source: int, tmp_path: Path) -> None:
    folder.write(W, KIND, None, source)
    before = entries(tmp_path, W)
    with pytest.raises(Unavailable, match="too long"):
        folder.write(W, KIND, None, source, is_awaited=lambda: False)
    with pytest.raises(Unavailable, match="too long"):
        folder.delete(W, is_awaited=lambda: False)
    assert entries(tmp_path, W) == before


def test_a_folder_that_is_gone_is_unavailable(tmp_path: Path, source: int) -> None:
    path = tmp_path / "store"
    path.mkdir()
    folder = StoreFolder(path)
    folder.create()
    aside = path.rename(tmp_path / "aside")
    # As the place where a filesystem is mounted is an empty folder while it is not.
    path.mkdir()
    for call in (
        lambda: load(folder, W),
        lambda: folder.write(W, KIND, None, source),
        lambda: folder.delete(W),
    ):
        with pytest.raises(Unavailable, match="not mounted, or nobody who may write there has served it"):
            call()
    path.rmdir()
    with pytest.raises(FileNotFoundError):
        folder.create()
    aside.rename(path)
    assert load(folder, W)[0] is None


def test_a_folder_without_room_is_full_and_nothing_is_left(folder: StoreFolder, tmp_path: Path) -> None:
    # A hole of the source costs nothing; the target may not become so long.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    nbytes = 2**20
    fd = os.memfd_create("tests")
    os.ftruncate(fd, nbytes)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with pytest.raises(StoreFull, match=os.strerror(errno.EFBIG)):
            folder.write(W, TensorType("int8", (nbytes,)), None, fd)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(fd)
    assert load(folder, W)[0] is None
    assert entries(tmp_path, W) == []

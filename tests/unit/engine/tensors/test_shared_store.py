"""Looks at the folder of `--store`: what others have changed is reported, once for each tensor, and nothing else is."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.no_threads import no_more_threads
from tilewire.service.engine.tensors.folder import StoredVersion, StoreFolder, Written, bucket_of
from tilewire.service.engine.tensors.shared_store import MAX_WAITING, Change, SharedStore, Watched
from tilewire.service.errors import TilewireError, TooBusy, Unavailable
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.op import TensorType

KIND = TensorType("int8", (4,))
WAIT_S = 20.0


class Loop:
    """A loop whose calls run when the test says so.

    Attributes:
        names: What it has.
        changes: Names that others have changed, with their versions.
    """

    def __init__(self) -> None:
        self.names: list[Watched] = []
        self.changes: list[tuple[str, int]] = []
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()

    def watched(self) -> list[Watched]:
        return self.names

    def call(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def on_changed(self, watched: Watched, version: int) -> None:
        self.changes.append((watched.name, version))

    def run_one(self) -> None:
        """Makes the next call; waits for it."""
        self._calls.get(timeout=WAIT_S)()

    def run(self) -> list[tuple[str, int]]:
        """Makes all calls; returns the changes that they reported."""
        while not self._calls.empty():
            self._calls.get()()
        changes, self.changes = self.changes, []
        return changes


class Scene:
    """A folder that this host and another one use.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = StoreFolder(path)
        self.folder.create()
        self.other = StoreFolder(path)
        self.other.create()
        self.loop = Loop()
        self.store = SharedStore(self.folder, WAIT_S, self.loop.call, self.loop.watched, self.loop.on_changed)
        self.fd = os.memfd_create("tests")
        os.write(self.fd, b"1234")

    def write(self, name: str) -> int:
        """Another host writes a name."""
        return self.other.write(name, KIND, None, self.fd).version

    def look(self) -> list[tuple[str, int]]:
        """Looks once, and returns what has changed."""
        self.store.look()
        return self.loop.run()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    scene.store.close()
    os.close(scene.fd)


def test_a_later_version_is_reported_until_the_name_is_dropped(scene: Scene) -> None:
    first = scene.write("w")
    scene.loop.names = [Watched("w", first, 0, 1)]
    assert scene.look() == []
    second = scene.write("w")
    assert scene.look() == [("w", second)]
    scene.loop.names = []
    assert scene.look() == []
    scene.loop.names = [Watched("w", second, 0, 2)]
    assert scene.look() == []
    deleted = scene.other.delete("w")
    assert deleted is not None
    assert scene.look() == [("w", deleted.version)]


def test_an_older_version_in_the_folder_is_a_change_too(scene: Scene) -> None:
    """Such as after the folder came back from a backup."""
    version = scene.write("w")
    scene.loop.names = [Watched("w", version + 5, 0, 1)]
    assert scene.look() == [("w", version)]


def test_a_result_of_this_host_stays_until_another_changes_its_name(scene: Scene) -> None:
    base = scene.write("w")
    scene.loop.names = [Watched("w", 0, base, 1)]
    assert scene.look() == []
    assert scene.look() == []
    scene.write("other")
    assert scene.look() == []
    version = scene.write("w")
    assert scene.look() == [("w", version)]
    # A new result stands above what is there then, also when that is deleted and forgotten.
    scene.loop.names = [Watched("w", 0, version, 2), Watched("x", 0, version, 3)]
    assert scene.look() == []
    # It was changed before this host took its first look.
    scene.loop.names = [Watched("w", 0, base, 4)]
    assert scene.look() == [("w", version)]


class Name(str):
    """A name that says whether it is still held."""

    __slots__ = ("__weakref__",)


def test_names_that_this_host_has_no_more_are_forgotten(scene: Scene) -> None:
    """Hosts load, and drop, more names than they have room for."""
    scene.write("w")
    of_one_folder = (one for one in map("v{}".format, itertools.count()) if bucket_of(one) == bucket_of("w"))
    held = []
    for generation, name in enumerate(map(Name, itertools.islice(of_one_folder, 4)), 1):
        held.append(weakref.ref(name))
        scene.loop.names = [Watched(name, 1, 0, generation)]
        scene.look()
    scene.loop.names = []
    del name
    assert [one() is not None for one in held] == [False, False, False, True]


def test_a_file_of_this_host_gives_way_to_the_store(scene: Scene) -> None:
    scene.loop.names = [Watched("stem/w", 0, 0, 1), Watched("stem/v", 0, 0, 2)]
    assert scene.look() == []
    version = scene.write("stem/w")
    assert scene.look() == [("stem/w", version)]


def test_a_bucket_that_cannot_be_read_holds_up_no_other(scene: Scene, tmp_path: Path) -> None:
    names = ["a", "b", "c"]
    scene.loop.names = [Watched(name, scene.write(name), 0, 1) for name in names]
    assert scene.look() == []
    bucket = tmp_path / f"{bucket_of('a'):02x}"
    bucket.rename(tmp_path / "aside")
    bucket.write_text("notes")
    changed = {(name, scene.write(name)) for name in names[1:]}
    with pytest.raises(NotADirectoryError):
        scene.store.look()
    assert set(scene.loop.run()) == changed


def test_a_folder_that_is_gone_changes_nothing(scene: Scene, tmp_path: Path) -> None:
    version = scene.write("w")
    scene.loop.names = [Watched("w", version, 0, 1)]
    aside = tmp_path.with_name("aside")
    tmp_path.rename(aside)
    assert not scene.loop.run()
    with pytest.raises(OSError, match="not mounted"):
        scene.store.look()
    assert scene.loop.run() == []
    aside.rename(tmp_path)
    assert scene.look() == []


def test_work_is_done_by_threads_and_its_outcome_comes_as_a_call(scene: Scene) -> None:
    scene.store.start(0.0)
    outcomes: list[object] = []
    info = TensorInfo("w", KIND, 0.0)
    scene.store.write(info, os.dup(scene.fd), None, outcomes.append)
    scene.loop.run_one()
    (written,) = outcomes
    assert isinstance(written, Written)

    def make_room(_stored: StoredVersion) -> int:
        return os.memfd_create("tests")

    scene.store.submit("w", partial(scene.folder.load, "w", 0, make_room), outcomes.append)
    scene.loop.run_one()
    loaded = outcomes[-1]
    assert isinstance(loaded, tuple)
    stored, fd = loaded
    assert stored.version == written.version
    assert os.pread(fd, 8, 0) == b"1234"
    os.close(fd)
    for _ in range(2):
        scene.store.submit("w", partial(scene.folder.delete, "w"), outcomes.append)
        scene.loop.run_one()
    assert outcomes.pop() is None
    scene.store.write(info, os.dup(scene.fd), (1,), outcomes.append)
    scene.loop.run_one()
    refusal = outcomes[-1]
    assert isinstance(refusal, TilewireError)
    assert refusal.status == 412


def test_a_bug_is_an_outcome_too(scene: Scene) -> None:
    scene.store.start(0.0)
    outcomes: list[object] = []
    scene.write("w")

    def make_room(_stored: StoredVersion) -> int:
        raise AssertionError("This is a bug.")

    scene.store.submit("w", partial(scene.folder.load, "w", 0, make_room), outcomes.append)
    scene.loop.run_one()
    assert isinstance(outcomes[0], Unavailable)


def test_a_folder_that_hangs_holds_up_nobody_who_asks(scene: Scene) -> None:
    """Work beyond what may wait is refused at once; the descriptor of a write is closed."""
    for number in range(MAX_WAITING):
        scene.store.submit(f"w{number}", lambda: None, lambda _outcome: None)
    with pytest.raises(TooBusy, match=str(MAX_WAITING)):
        scene.store.submit("one more", lambda: None, lambda _outcome: None)
    # Others of this process may close theirs meanwhile, so they are not counted.
    fd = os.dup(scene.fd)
    with pytest.raises(TooBusy):
        scene.store.write(TensorInfo("w", KIND, 0.0), fd, None, lambda _outcome: None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_write_that_nobody_awaits_any_more_is_freed_at_once_and_not_made(scene: Scene) -> None:
    """Its thread may wait for the folder for hours, and its bytes are memory of the host."""
    outcomes: list[object] = []
    fd = os.dup(scene.fd)
    change = scene.store.write(TensorInfo("w", KIND, 0.0), fd, None, outcomes.append)
    assert change.is_awaited()
    change.drop()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    scene.store.start(0.0)
    scene.loop.run_one()
    assert isinstance(outcomes[0], Unavailable)
    assert scene.folder.last_version("w") == 0


def test_a_change_is_awaited_for_so_long(scene: Scene) -> None:
    assert Change(timeout_s=WAIT_S).is_awaited()
    assert not Change(timeout_s=0.0).is_awaited()
    with pytest.raises(Unavailable, match="too long"):
        scene.folder.write("w", KIND, None, scene.fd, is_awaited=Change(timeout_s=0.0).is_awaited)


def test_a_look_that_finds_no_thread_fails_and_the_next_one_tries_again(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    looks, failures = queue.Queue[None](), queue.Queue[None]()

    def watched() -> list[Watched]:
        looks.put(None)
        return []

    store = SharedStore(scene.folder, 0.01, scene.loop.call, watched, scene.loop.on_changed, lambda: failures.put(None))
    store.start(WAIT_S)
    with no_more_threads():
        for _ in range(2):
            failures.get(timeout=WAIT_S)
    assert "the folder cannot be read: can't start new thread" in caplog.text
    while not looks.empty():
        looks.get()
    looks.get(timeout=WAIT_S)
    store.close()


def test_a_look_that_does_not_end_fails(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """A mount whose server is gone answers nothing at all."""
    can_end, failures = threading.Event(), queue.Queue[None]()

    def watched() -> list[Watched]:
        can_end.wait(WAIT_S)
        return []

    store = SharedStore(
        scene.folder, 0.01, scene.loop.call, watched, scene.loop.on_changed, lambda: failures.put(None), look_s=0.01
    )
    with caplog.at_level("INFO"):
        store.start(0.0)
        for _ in range(3):
            failures.get(timeout=WAIT_S)
        assert caplog.text.count("takes more than 0.01 s") == 1
        can_end.set()
        end_s = time.monotonic() + WAIT_S
        while "can be read again" not in caplog.text:
            assert time.monotonic() < end_s
            time.sleep(0.01)
    store.close()

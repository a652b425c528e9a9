"""The arena: slots never overlap, nothing leaks, neighbours merge, whatever the order."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import itertools
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilewire.service.errors import TooBusy
from tilewire.service.ipc.arena import PIECE_BYTES, SLOT_ALIGN, Arena, Lease, Segment, make_sealed, slot_bytes

NBYTES = 64 * 1024


def test_huge_pages_are_asked_for_and_every_page_is_there() -> None:
    segment = Segment.create("test", 2**22)
    assert os.fstat(segment.fd).st_blocks == 0
    huge_bytes = segment.take_huge_pages()
    assert os.fstat(segment.fd).st_blocks * 512 == 2**22
    allowed = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
    assert (huge_bytes > 0) == any(word in allowed for word in ("[always]", "[advise]", "[within_size]", "[force]"))
    assert bytes(segment.view) == bytes(2**22)
    segment.close()


class Leasing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment.create("test", NBYTES)
        self.arena = Arena(self.segment)
        self.leases: list[tuple[Lease, int]] = []
        self.number = 0

    def fill(self, lease: Lease) -> None:
        self.number = self.number % 255 + 1
        lease.view[:] = bytes([self.number]) * lease.nbytes
        self.leases.append((lease, self.number))

    @rule(nbytes=st.integers(0, NBYTES // 3), spare_bytes=st.sampled_from([0, 0, 1, 255, 256, 5000]))
    def lease(self, nbytes: int, spare_bytes: int) -> None:
        try:
            self.fill(self.arena.lease(nbytes, spare_bytes))
        except TooBusy:
            assert self.leases, "an empty arena refused"

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease, number = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        assert bytes(lease.view) == bytes([number]) * lease.nbytes
        lease.release()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        lease, _ = self.leases[data.draw(st.integers(0, len(self.leases) - 1))]
        if not lease.spare_bytes:
            lease.shrink(data.draw(st.integers(0, lease.nbytes)))

    @invariant()
    def contents_are_untouched(self) -> None:
        for lease, number in self.leases:
            assert bytes(lease.view) == bytes([number]) * lease.nbytes

    @invariant()
    def slots_are_apart_and_aligned(self) -> None:
        spans = [(lease.offset, lease.offset + lease.nbytes) for lease, _ in self.leases]
        spare = (lease for lease, _ in self.leases if lease.spare_bytes)
        spans += ((lease.spare_offset, lease.spare_offset + lease.spare_bytes) for lease in spare)
        spans.sort()
        assert all(offset % SLOT_ALIGN == 0 for offset, _ in spans)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))

    @invariant()
    def nothing_leaks(self) -> None:
        slots = sum(slot_bytes(lease.nbytes) for lease, _ in self.leases)
        spare = sum(slot_bytes(lease.spare_bytes) for lease, _ in self.leases if lease.spare_bytes)
        assert self.arena.used_bytes == slots + spare

    def teardown(self) -> None:
        for lease, _ in self.leases:
            lease.release()
        assert self.arena.used_bytes == 0
        # Everything merged: the whole is one range again.
        self.arena.lease(self.arena.capacity).release()
        self.segment.close()


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)


def test_a_full_arena_says_what_is_free() -> None:
    arena = Arena(Segment.create("test", NBYTES))
    lease = arena.lease(NBYTES)
    with pytest.raises(TooBusy, match="0 of the 65536"):
        arena.lease(1)
    lease.release()
    assert arena.free_bytes == arena.capacity


def test_first_fit_reuses_the_lowest_addresses() -> None:
    arena = Arena(Segment.create("test", NBYTES))
    first, second = arena.lease(1000), arena.lease(1000)
    first.release()
    assert arena.lease(500).offset == 0
    assert second.offset == 1024


def test_a_segment_is_shared_and_cannot_shrink() -> None:
    ours = Segment.create("test", NBYTES)
    theirs = Segment.attach(os.dup(ours.fd), NBYTES)
    ours.view[:5] = b"hello"
    assert bytes(theirs.view[:5]) == b"hello"
    with pytest.raises(PermissionError):
        os.ftruncate(ours.fd, 10)
    theirs.close()
    ours.close()


def test_only_sealed_segments_of_their_size_are_attached() -> None:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, mmap.PAGESIZE)
    with pytest.raises(ValueError, match="not a sealed segment"):
        Segment.attach(fd, mmap.PAGESIZE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError, match="not a sealed segment"):
        Segment.attach(fd, 2 * mmap.PAGESIZE)
    Segment.attach(fd, mmap.PAGESIZE).close()


@contextlib.contextmanager
def address_space(nbytes: int) -> Iterator[None]:
    """Lets this process map so much and no more."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_descriptor_that_cannot_be_mapped_stays_the_callers() -> None:
    """Closed twice, its number may be another file's by then."""
    nbytes = 2**42
    fd = make_sealed("test", nbytes)
    with address_space(nbytes // 2), pytest.raises(OSError, match="Cannot allocate memory"):
        Segment.attach(fd, nbytes)
    gc.collect()
    assert os.fstat(fd).st_size == nbytes
    os.close(fd)


def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with address_space(2**41), pytest.raises(OSError, match="Cannot allocate memory"):
        Segment.create("test", 2**42)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_shared_memory_that_is_too_large_for_a_file_leaves_no_descriptor() -> None:
    before, limits = len(list(Path("/proc/self/fd").iterdir())), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            make_sealed("test", NBYTES + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_closing_a_segment_waits_for_its_views() -> None:
    segment = Segment.create("test", NBYTES)
    view = segment.view[:4]
    segment.close()
    assert bytes(view) == bytes(4)


def test_a_segment_that_nobody_holds_leaves_no_descriptor() -> None:
    segment = Segment.create("test", NBYTES)
    path = Path(f"/proc/self/fd/{segment.fd}")
    held = path.stat()
    del segment
    gc.collect()
    # Another thread may have the number again.
    assert not path.exists() or path.stat().st_ino != held.st_ino


def test_pages_are_taken_early() -> None:
    segment = Segment.create("tests", 2**22)
    segment.take_pages(2**20, 2**20)
    assert os.fstat(segment.fd).st_blocks * 512 == 2**20
    segment.close()
    with pytest.raises(ValueError, match="closed"):
        segment.take_pages(0, 2**20)


@pytest.mark.parametrize("nbytes", [2**20, PIECE_BYTES + 2**20])
def test_all_pages_are_taken_by_several_threads(nbytes: int) -> None:
    segment = Segment.create("tests", nbytes)
    segment.view[5] = 7
    segment.take_all_pages()
    assert os.fstat(segment.fd).st_blocks * 512 == nbytes
    assert segment.view[5] == 7
    # Nothing holds the mapping.
    segment.close()
    with pytest.raises(ValueError, match="released"):
        segment.view[5] = 8

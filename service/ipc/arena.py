"""Shared memory between a gateway and its engines: segments, slots and leases.

A `Segment` is a sealed memfd that two processes map. An `Arena` hands out slots of one segment; only the gateway that made
the segment allocates from it, so nothing here takes a lock.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tilewire.service.config.machine import num_cores
from tilewire.service.errors import TooBusy

# Slots begin on cache-line pairs: two requests never share a line, and every dtype is aligned in its slot.
SLOT_ALIGN = 256

# Of Linux 5.14; Python's `mmap` has no name for it.
MADV_POPULATE_WRITE = 23
# Threads that clear pages: memory takes no more than some threads give. What each takes at a time: whatever else of the
# process maps or unmaps memory waits as long.
MAX_THREADS = 8
PIECE_BYTES = 2**22

_libc = ctypes.CDLL(None)


def make_sealed(name: str, nbytes: int) -> int:
    """Makes shared memory without a name that can neither shrink nor grow; returns its descriptor.

    Raises:
        OSError: No descriptor, or a file may not have so many bytes.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
    except BaseException:
        os.close(fd)
        raise
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


class Segment:
    """A range of shared memory without a name; gone when the last process that maps it is.

    Attributes:
        fd: The descriptor to hand to another process; closed with the segment, or when nobody holds the segment any more.
            It stays the caller's where it cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int) -> None:
        self._map = mmap.mmap(fd, nbytes)
        self.fd = fd
        self.nbytes = nbytes
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._close_fd.atexit = False
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Makes a segment that can neither shrink nor grow, so that no reader can be cut off by its peer.

        Args:
            name: For `/proc/<pid>/maps` only.
            nbytes: Size of the segment; pages are taken when first touched.

        Raises:
            OSError: It cannot be made, or not mapped.
        """
        fd = make_sealed(name, nbytes)
        try:
            return cls(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Maps a segment that another process made.

        Raises:
            ValueError: The descriptor is smaller than it was said to be, or could still shrink.
            OSError: It cannot be mapped.
        """
        is_sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not is_sealed or os.fstat(fd).st_size < nbytes:
            raise ValueError(f"not a sealed segment of {nbytes} bytes")
        return cls(fd, nbytes)

    def take_pages(self, begin: int, nbytes: int) -> None:
        """Takes pages now instead of at their first use; other threads run meanwhile. Does nothing where the system cannot.

        Args:
            begin: First byte; a multiple of the page size.
            nbytes: Bytes from there.

        Raises:
            ValueError: The segment is closed.
        """
        _take_pages(self._map, begin, nbytes)

    def take_all_pages(self) -> None:
        """Takes all pages now, by several threads: the system clears each, which is most of what pinning them takes."""
        take_all_pages(self._map)

    def take_huge_pages(self) -> int:
        """Takes all pages now, huge ones where the system allows them to shared memory.

        The first process to touch a page decides its size, so this comes before any peer maps the segment.

        Returns:
            How many bytes of shared memory this process has in huge pages; 0 also where the system does not say.
        """
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
            self._map.madvise(MADV_POPULATE_WRITE)
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
                if line.startswith("ShmemPmdMapped:"):
                    return int(line.split()[1]) * 1024
        return 0

    def close(self) -> None:
        """Unmaps and closes. Views that are still held keep the mapping until they go."""
        self._close_fd()
        try:
            self.view.release()
            self._map.close()
        except BufferError:
            # Someone still holds a slice; the mapping goes with the last of them.
            return


def take_all_pages(mapping: mmap.mmap) -> None:
    """Takes all pages of a mapping now, by several threads. Does nothing with pages that its file has no more."""
    nbytes = len(mapping)
    with ThreadPoolExecutor(max(1, min(MAX_THREADS, num_cores() // 2))) as pool:
        for begin in range(0, nbytes, PIECE_BYTES):
            pool.submit(_take_pages, mapping, begin, min(PIECE_BYTES, nbytes - begin))


def _take_pages(mapping: mmap.mmap, begin: int, nbytes: int) -> None:
    # `mmap.madvise` keeps the interpreter's lock: half a second for 2 GiB. The object keeps the mapping until it goes.
    first = ctypes.c_char.from_buffer(mapping, begin)
    _libc.madvise(ctypes.byref(first), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE)


class Lease(msgspec.Struct, eq=False):
    """A slot in use. Release it exactly once.

    Attributes:
        offset: From the start of the segment.
        nbytes: Requested size; the slot may be a little larger.
        spare_bytes: Requested room for something else behind them.
        spare_offset: Offset of that room, aligned as a slot is.
        result_bytes: Bytes of both that are for results.
    """

    _arena: Arena | None
    offset: int
    nbytes: int
    _size: int
    spare_bytes: int
    spare_offset: int
    result_bytes: int = 0

    @property
    def view(self) -> memoryview:
        """The slot's bytes, exactly `nbytes` of them, writable."""
        assert self._arena is not None, "This is a bug: a released slot is used."
        return self._arena.segment.view[self.offset : self.offset + self.nbytes]

    def shrink(self, nbytes: int) -> None:
        """Keeps the first `nbytes` and gives the rest back."""
        assert self._arena is not None, "This is a bug: a released slot is used."
        assert nbytes <= self.nbytes, "This is a bug: a slot cannot grow."
        assert not self.spare_bytes, "This is a bug: results lie behind it."
        kept = slot_bytes(nbytes)
        if kept < self._size:
            self._arena.give_back(self.offset + kept, self._size - kept)
        self.nbytes, self._size = nbytes, kept

    def release(self) -> None:
        """Gives the slot back."""
        assert self._arena is not None, "This is a bug: a slot is released twice."
        arena, self._arena = self._arena, None
        arena.give_back(self.offset, self._size)


class Arena:
    """Hands out slots of one segment: first fit by address, neighbours merged when they come back.

    First fit keeps traffic in the low addresses, whose pages and cache lines are warm.

    Args:
        segment: The memory. One owner, one thread.

    Attributes:
        capacity: Bytes in all.
        free_bytes: Bytes that are not leased, in one piece or more.
        on_freed: Called when bytes came back; None while nobody waits for them.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._starts: list[int] = [0]
        self._sizes: list[int] = [segment.nbytes // SLOT_ALIGN * SLOT_ALIGN]
        self.capacity = self._sizes[0]
        self.free_bytes = self.capacity
        self.on_freed: Callable[[], None] | None = None

    def __str__(self) -> str:
        """Free memory, for error texts."""
        longest = max(self._sizes, default=0)
        return (
            f"{self.free_bytes} of the {self.capacity} bytes of this gateway's arena are free, {longest} in one piece"
        )

    @property
    def used_bytes(self) -> int:
        """Bytes in slots that are leased."""
        return self.capacity - self.free_bytes

    def lease(self, nbytes: int, spare_bytes: int = 0) -> Lease:
        """Takes a slot of at least `nbytes`, and room for `spare_bytes` behind them; its contents are undefined.

        Raises:
            TooBusy: No free range is long enough right now.
        """
        spare_at = size = slot_bytes(nbytes)
        if spare_bytes:
            size += slot_bytes(spare_bytes)
        starts, sizes = self._starts, self._sizes
        # Mostly the first range will do, and a generator costs more than the look.
        index = 0
        if not (sizes and sizes[0] >= size):
            index = next((index for index, free in enumerate(sizes) if free >= size), -1)
            if index < 0:
                raise TooBusy(f"no room for {nbytes} bytes: {self}")
        offset = starts[index]
        if sizes[index] == size:
            del starts[index], sizes[index]
        else:
            starts[index] = offset + size
            sizes[index] -= size
        self.free_bytes -= size
        return Lease(self, offset, nbytes, size, spare_bytes, offset + spare_at)

    def give_back(self, offset: int, size: int) -> None:
        """Takes memory back; `Lease.release` calls it."""
        self.free_bytes += size
        starts, sizes, end = self._starts, self._sizes, offset + size
        index = bisect.bisect_left(starts, offset)
        assert index == len(starts) or end <= starts[index], "This is a bug: slots overlap."
        joins_next = index < len(starts) and end == starts[index]
        if index > 0 and starts[index - 1] + sizes[index - 1] == offset:
            sizes[index - 1] += size
            if joins_next:
                sizes[index - 1] += sizes[index]
                del starts[index], sizes[index]
        elif joins_next:
            starts[index] = offset
            sizes[index] += size
        else:
            starts.insert(index, offset)
            sizes.insert(index, size)
        if self.on_freed is not None:
            self.on_freed()


def slot_bytes(nbytes: int) -> int:
    """Bytes of memory that a slot of `nbytes` takes."""
    return (nbytes + SLOT_ALIGN - 1) & -SLOT_ALIGN or SLOT_ALIGN

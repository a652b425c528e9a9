"""The CPU backend from slot to slot against NumPy: unaligned offsets, Fortran order, every dtype."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from tests.support import float64_oracle as oracle
from tests.support.float64_oracle import assert_close, random_array
from tests.support.jobs import JobBench
from tests.support.no_memory import no_more_memory
from tests.support.no_threads import no_more_threads
from tests.support.peak import begin_peak, peak_bytes
from tests.support.tensor_bodies import NUMPY, Array
from tests.support.transfers import download, uploaded
from tilewire.service.engine.backends.contract import HostBytes, LaunchFailed
from tilewire.service.engine.backends.cpu import PART_BYTES, SMALL_ELEMENTS, SMALL_FLOPS, CpuBackend
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import join, launch_of
from tilewire.service.engine.tensors.arrivals import begin_arrival
from tilewire.service.engine.tensors.resident import Resident, make_copy, map_file
from tilewire.service.errors import TooBusy, Unavailable
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import TensorInfo
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import Limits, TensorType
from tilewire.service.ops.planning import parse_options, plan
from tilewire.service.ops.registry import OPS
from tilewire.service.ops.softmax import SoftmaxOptions

NBYTES = 2**21


class Room:
    """A segment as the backend sees it, filled from the front."""

    def __init__(self, backend: CpuBackend, nbytes: int = NBYTES) -> None:
        self.backend = backend
        self.segment = Segment.create("test", nbytes)
        self.mapped = backend.attach(self.segment)
        self.end = 0

    def place(self, array: Array, skew: int = 0, *, fortran: bool = False) -> HostBytes:
        offset = -(-self.end // 256) * 256 + skew
        data = array.tobytes(order="F" if fortran else "C")
        self.segment.view[offset : offset + len(data)] = data
        self.end = offset + len(data)
        return HostBytes(self.mapped, TensorType(array.dtype.name, array.shape), offset, fortran)

    def read(self, source: HostBytes) -> Array:
        data = bytes(self.segment.view[source.offset : source.offset + source.type.nbytes])
        return np.frombuffer(data, NUMPY[source.type.dtype]).reshape(source.type.shape)

    def run(
        self, op: str, inputs: dict[str, HostBytes | torch.Tensor], types: dict[str, TensorType], **options: object
    ) -> Array:
        parsed = parse_options(OPS[op], options)
        (out,) = plan(OPS[op], types, parsed, Limits()).outputs
        slot = self.place(np.zeros(out.shape, NUMPY[out.dtype]))
        self.backend.begin([launch_of(OPS[op], parsed, inputs, [slot])]).wait()
        return self.read(slot)


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room(CpuBackend())
    yield room
    room.backend.detach(room.mapped)


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("skew", [0, 1, 3, 4])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"])
def test_matmul_from_any_offset_and_order(room: Room, dtype: str, skew: int, fortran: bool) -> None:
    arrays = {"a": random_array(dtype, (7, 9), 1), "b": random_array(dtype, (9, 5), 2)}
    inputs = {name: room.place(array, skew, fortran=fortran) for name, array in arrays.items()}
    out = room.run("matmul", dict(inputs), {name: source.type for name, source in inputs.items()})
    assert_close(out, *oracle.matmul(arrays, {}))


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "transpose_b"),
    [((31, 257), (257, 1), False), ((257, 1024), (5, 1024), True)],
)
def test_where_an_operand_begins_changes_no_bit_of_a_batch_invariant_result(
    a_shape: tuple[int, int], b_shape: tuple[int, int], transpose_b: bool
) -> None:
    a, b = random_array("float32", a_shape, 1), random_array("float32", b_shape, 2)
    types = {"a": TensorType("float32", a_shape), "b": TensorType("float32", b_shape)}
    results = set()
    for skew in range(0, 64, 4):
        room = Room(CpuBackend(batch_invariant=True))
        inputs: dict[str, HostBytes | torch.Tensor]
        inputs = {"a": room.place(a, skew), "b": uploaded(room.backend, room.place(b, 60 - skew))}
        results.add(room.run("matmul", inputs, types, transpose_b=transpose_b).tobytes())
        room.backend.detach(room.mapped)
    assert len(results) == 1


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_along_any_axis_of_any_order(room: Room, axis: int, fortran: bool) -> None:
    x = random_array("float32", (4, 6, 3))
    source = room.place(x, 2, fortran=fortran)
    assert_close(room.run("softmax", {"x": source}, {"x": source.type}, axis=axis), *oracle.softmax(x, axis))


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("size", [128, 129, 2**13])
def test_softmax_of_many_small_elements_beside_a_large_one(room: Room, size: int, log: bool) -> None:
    """Each small exponential is 0.55 of the last place of the sum: float32 additions round it up to a whole one."""
    x = np.full((1, size), np.log(0.55 * 2**-23), np.float32)
    x[0, 0] = 0
    source = room.place(x)
    assert_close(room.run("softmax", {"x": source}, {"x": source.type}, log=log), *oracle.softmax(x, log=log))


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_add_of_wide_numbers_from_any_offset(room: Room, dtype: str) -> None:
    a, b = random_array(dtype, (5, 1), 1), random_array(dtype, (4,), 2)
    inputs = {"a": room.place(a, 1), "b": room.place(b, 5)}
    out = room.run("add", dict(inputs), {name: source.type for name, source in inputs.items()}, alpha=2)
    np.testing.assert_array_equal(out, a + 2 * b)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("alpha", [1e39, -1e300])
def test_an_alpha_past_float32_is_infinite(room: Room, dtype: str, alpha: float) -> None:
    a, b = np.ones(3, NUMPY[dtype]), np.array([1, -2, 0], NUMPY[dtype])
    inputs = {"a": room.place(a), "b": room.place(b)}
    out = room.run("add", dict(inputs), {name: source.type for name, source in inputs.items()}, alpha=alpha)
    np.testing.assert_array_equal(out.astype(np.float64), np.array([np.inf, -np.inf, np.nan]) * np.sign(alpha))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)])
@pytest.mark.parametrize("fortran", [False, True])
def test_residents_go_up_and_down(room: Room, shape: tuple[int, ...], fortran: bool) -> None:
    array = random_array("float32", shape)
    resident = uploaded(room.backend, room.place(array, fortran=fortran))
    slot = room.place(np.zeros(shape, np.float32))
    download(room.backend, resident, slot)
    np.testing.assert_array_equal(room.read(slot), array)


def test_an_answer_writes_nothing_around_its_slot(room: Room) -> None:
    before, after = room.place(np.full(256, 7, np.int8)), None
    x = room.place(random_array("float32", (3, 5)))
    out = room.run("softmax", {"x": x}, {"x": x.type})
    after = room.place(np.zeros(256, np.int8))
    assert out.shape == (3, 5)
    assert np.all(room.read(before) == 7)
    end = after.offset - 256 + 60
    assert not any(room.segment.view[end : after.offset])


def test_small_launches_take_this_thread_and_large_ones_another() -> None:
    """And give the same, whichever came first."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    rung: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    try:
        bench = JobBench(2**24)
        bench.backend = CpuBackend(ring=lambda: rung.put((threading.current_thread().name, torch.get_num_threads())))
        small, large = (torch.ones(size, size) for size in (8, 512))
        for values in (large, small, small, large):
            job = bench.job("matmul", MatmulOptions(), a=bench.put(values), b=bench.put(values))
            running = bench.backend.begin(join([job]))
            assert running.rings is (values is large)
            running.wait()
            assert running.is_done()
            if running.rings:
                assert rung.get(timeout=10) == ("compute", 2)
            else:
                assert torch.get_num_threads() == 1
            assert tensor_of(job.outs[0]).unique().tolist() == [float(len(values))]
        assert rung.empty()
    finally:
        torch.set_num_threads(before)


def test_launches_that_are_begun_beside_each_other_do_not_wait_for_each_other() -> None:
    bench = JobBench(2**26)
    long, short = (
        bench.backend.begin(join([bench.job("matmul", MatmulOptions(), a=bench.put(one), b=bench.put(one))]))
        for one in (torch.ones(2048, 2048), torch.ones(256, 256))
    )
    short.wait()
    assert not long.is_done()
    assert long.wait().kernel_ns > 0


@pytest.mark.parametrize("size", [SMALL_ELEMENTS // 2, SMALL_ELEMENTS // 2 - 1])
def test_a_launch_is_small_by_its_operations_and_its_elements(size: int) -> None:
    bench = JobBench(2**24)
    job = bench.job("softmax", SoftmaxOptions(), x=bench.put(torch.zeros(1, size)))
    (launch,) = join([job])
    assert bench.backend.begin([launch]).rings is (size == SMALL_ELEMENTS // 2)
    small = msgspec.structs.replace(launch, flops=SMALL_FLOPS)
    assert bench.backend.begin([small]).rings
    bench.backend.begin([small]).wait()


def test_a_launch_that_fails_in_the_thread_says_so_and_the_next_one_is_computed() -> None:
    bench = JobBench(2**22)
    job = bench.job("matmul", MatmulOptions(), a=bench.put(torch.ones(256, 256)), b=bench.put(torch.ones(256, 256)))
    (launch,) = join([job])
    (pieces, shape) = launch.concatenated["b"]
    unequal = msgspec.structs.replace(pieces[0], type=TensorType("float32", (128, 512)))
    broken = msgspec.structs.replace(launch, concatenated={**launch.concatenated, "b": ([unequal], shape)})
    failed, right = bench.backend.begin([broken]), bench.backend.begin([launch])
    with pytest.raises(LaunchFailed, match="shapes"):
        failed.wait()
    assert right.wait().kernel_ns > 0
    assert tensor_of(job.outs[0]).unique().tolist() == [256.0]


def test_without_memory_a_launch_is_refused_and_the_next_one_is_computed() -> None:
    """An operand at an odd address is copied."""
    bench = JobBench(2**28, align=1)
    bench.put(torch.ones(1, dtype=torch.int8))
    a, b = bench.put(torch.ones(2**8, 2**12)), bench.put(torch.ones(2**12, 2**13))
    launches = join([bench.job("matmul", MatmulOptions(), a=a, b=b)])
    bench.backend.begin(launches).wait()
    with no_more_memory():
        refused = bench.backend.begin(launches)
        with pytest.raises(LaunchFailed, match="no memory on the host") as raised:
            refused.wait()
    assert isinstance(raised.value.error, TooBusy)
    assert bench.backend.begin(launches).wait().kernel_ns > 0


def test_where_no_thread_can_be_started_the_next_launch_tries_again() -> None:
    bench = JobBench(2**22)
    job = bench.job("matmul", MatmulOptions(), a=bench.put(torch.ones(256, 256)), b=bench.put(torch.ones(256, 256)))
    launches = join([job])
    with no_more_threads(), pytest.raises(Unavailable, match="no more threads"):
        bench.backend.begin(launches)
    assert bench.backend.begin(launches).wait().kernel_ns > 0


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("softmax", {}),
        ("normalize", {"kind": "layer"}),
        ("reduce", {"kind": "sum", "axis": -1}),
        ("pointwise", {"fn": "gelu"}),
    ],
)
@pytest.mark.parametrize("shape", [(30_000, 1024), (300, 100, 1024)])
def test_a_large_request_is_computed_in_parts(op: str, options: dict[str, object], shape: tuple[int, ...]) -> None:
    """With the same bits as its rows alone, and without several times its size in wider numbers."""
    room = Room(CpuBackend(), 2**28)
    x = np.resize(random_array("float16", (1024, 1024), 1), shape)
    source = room.place(x)
    assert source.type.nbytes > 3 * PART_BYTES
    room.run(op, {"x": room.place(x[:1])}, {"x": TensorType("float16", (1, *shape[1:]))}, **options)
    before = begin_peak()
    out = room.run(op, {"x": source}, {"x": source.type}, **options)
    # What is written to the slots of the result, and the copy that `read` makes, are as large as the result.
    assert peak_bytes() - before < 3 * out.nbytes + 2**26
    count = shape[0] // 300
    for first in (0, 70 * count, 299 * count):
        rows = room.place(x[first : first + count])
        np.testing.assert_array_equal(
            out[first : first + count], room.run(op, {"x": rows}, {"x": rows.type}, **options)
        )
    room.backend.detach(room.mapped)
    room.segment.close()


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((24_000, 1024), (1024,)), ((24_000, 1), (1, 1024)), ((1,), (240, 100, 1024))]
)
def test_a_large_sum_of_operands_that_repeat_is_computed_in_parts(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...]
) -> None:
    room = Room(CpuBackend(), 2**28)
    a, b = random_array("float32", a_shape, 1), random_array("float32", b_shape, 2)
    inputs = {"a": room.place(a), "b": room.place(b)}
    types = {name: source.type for name, source in inputs.items()}
    before = begin_peak()
    out = room.run("add", dict(inputs), types, alpha=3)
    # The slot, what fills it at first, and the copy of `read`. The sum is twice as large in float64.
    assert peak_bytes() - before < 3 * out.nbytes + 2**26
    np.testing.assert_array_equal(out, (a + 3 * b.astype(np.float64)).astype(np.float32))
    room.backend.detach(room.mapped)
    room.segment.close()


@pytest.mark.alone
def test_a_large_resident_is_freed_beside_the_loop() -> None:
    """Whoever lets go of it waits neither for the system nor for a thread that holds the interpreter's lock meanwhile."""
    stalls = [longest_stall_and_all_s(2**28) for _ in range(3)]
    assert min(stall / took for stall, took in stalls) < 0.5, stalls


class Freed(list[torch.Tensor]):
    """A list that knows when its tensors have gone."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__(tensors)
        self.is_over = False

    def clear(self) -> None:
        super().clear()
        self.is_over = True


def longest_stall_and_all_s(nbytes: int) -> tuple[float, float]:
    """How long this thread stood still at most while a resident was freed, and how long that took."""
    backend, kind = CpuBackend(), TensorType("float32", (nbytes // 16, 4))
    fd = make_copy("x", nbytes)
    copy = HostBytes(map_file(fd, nbytes), kind, 0)
    os.close(fd)
    copy.mapped.fill_(1)
    resident = Resident(TensorInfo("x", kind, created=0.0))
    list(begin_arrival(backend, resident, copy)(backend.open_copier()))
    del copy
    freed = Freed(resident.take_tensors())
    longest_s, begun_s = 0.0, time.monotonic()
    last_s = now_s = begun_s
    backend.free(freed)
    while not freed.is_over:
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        assert now_s < begun_s + 10
    return max(longest_s, time.monotonic() - last_s), time.monotonic() - begun_s

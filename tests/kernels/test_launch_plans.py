"""Launch plans, in the interpreter: each request gets its own result from memory that is shared, kept, padded or cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.support.host_pipeline import host_pipeline
from tests.support.jobs import JobBench
from tilewire.service.engine.backends.chunks import Chunks
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.gpu.batched import (
    MAX_CONCURRENT,
    MAX_REQUEST_BYTES,
    BatchedPlans,
    BoundBatch,
)
from tilewire.service.engine.backends.gpu.chunks import Chunked
from tilewire.service.engine.backends.gpu.launch_plan import PlanCache
from tilewire.service.engine.backends.gpu.launch_plans import LaunchPlans
from tilewire.service.engine.backends.gpu.staging import Staging
from tilewire.service.engine.backends.host import TORCH_DTYPES, tensor_of
from tilewire.service.engine.loop.batching import join
from tilewire.service.engine.loop.jobs import BoundJob
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.merge import MergeOptions
from tilewire.service.ops.op import OpOptions, TensorType
from tilewire.service.ops.planning import parse_options
from tilewire.service.ops.registry import OPS
from tilewire.service.ops.softmax import SoftmaxOptions

CPU = torch.device("cpu")
Given = np.ndarray | torch.Tensor


class Slots(JobBench):
    """A segment that fills up, and what runs launches over it."""

    def __init__(self) -> None:
        super().__init__(2**21)
        self.staging = Staging(CPU)
        self.staging.add_mapped(self.mapped)
        self.pipeline = host_pipeline()
        self.batched = BatchedPlans(self.staging, self.pipeline, is_invariant=False)
        self.plans = LaunchPlans(self.staging, self.pipeline, is_invariant=False)

    def given(self, op: str, options: OpOptions, **inputs: Given) -> BoundJob:
        """A job; arrays are put into the segment, tensors are residents."""
        placed = {
            name: self.put(torch.from_numpy(one)) if isinstance(one, np.ndarray) else one
            for name, one in inputs.items()
        }
        return self.job(op, options, **placed)

    def alone(self, op: str, options: OpOptions, **inputs: Given) -> LaunchSpec:
        (launch,) = join([self.given(op, options, **inputs)])
        return launch

    def joint(self, jobs: Sequence[BoundJob]) -> LaunchSpec:
        (launch,) = join(jobs)
        return launch

    def run(self, plan: BoundBatch | None, launch: LaunchSpec) -> list[np.ndarray]:
        assert plan is not None
        plan.run([launch], self.pipeline).wait()
        return results(launch)


def results(launch: LaunchSpec) -> list[np.ndarray]:
    return [tensor_of(place).numpy().copy() for place in launch.outputs[0][0]]


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    shifted = np.exp(x.astype(np.float64) - x.max(axis, keepdims=True))
    quotient: np.ndarray = shifted / shifted.sum(axis, keepdims=True)
    return quotient


@pytest.fixture
def slots() -> Slots:
    return Slots()


def integers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-4, 4, shape).astype(np.float32)


@pytest.mark.parametrize("width", [8, 7])
def test_a_second_request_of_a_signature_is_prepared_and_each_gets_its_own_result(slots, width):
    """Rows of 7 are padded on the device, and are not where they come from."""
    rng = np.random.default_rng(width)
    w = torch.from_numpy(integers(rng, 5, width))
    for number in range(4):
        a = integers(rng, 3, 5)
        launch = slots.alone("matmul", MatmulOptions(), a=a, b=w)
        plan = slots.batched.find(launch)
        assert (plan is None) == (number == 0)
        if number:
            np.testing.assert_array_equal(slots.run(plan, launch)[0], a @ w.numpy())


@pytest.mark.parametrize("width", [8, 7])
def test_batches_of_any_number_share_what_was_prepared(slots, width):
    rng = np.random.default_rng(width)
    w = torch.from_numpy(integers(rng, 5, width))
    prepared = set()
    for number, count in enumerate((3, 4, 2, 7, 8, 5)):
        rows = [integers(rng, 2, 5) for _ in range(count)]
        launch = slots.joint([slots.given("matmul", MatmulOptions(), a=a, b=w) for a in rows])
        plan = slots.batched.find(launch)
        assert (plan is None) == (number == 0)
        if plan is not None:
            prepared.add(plan.plan.capacity)
            for a, result in zip(rows, slots.run(plan, launch), strict=True):
                np.testing.assert_array_equal(result, a @ w.numpy())
    assert prepared == {4, 8}


@pytest.mark.parametrize("count", [2, 3])
def test_sums_softmaxes_and_stacked_products_are_batched(slots, count):
    rng = np.random.default_rng(count)
    for _ in range(2):
        a, b = ([integers(rng, 4, 6) for _ in range(count)] for _ in "ab")
        wide = [integers(rng, 6, 4) for _ in range(count)]
        launches = [
            slots.joint([slots.given("add", AddOptions(alpha=2), a=x, b=y) for x, y in zip(a, b, strict=True)]),
            slots.joint([slots.given("softmax", SoftmaxOptions(), x=x) for x in a]),
            slots.joint([slots.given("matmul", MatmulOptions(), a=x, b=y) for x, y in zip(a, wide, strict=True)]),
        ]
        plans = [slots.batched.find(launch) for launch in launches]
    sums, softs, stack = (slots.run(plan, launch) for plan, launch in zip(plans, launches, strict=True))
    for x, y, result in zip(a, b, sums, strict=True):
        np.testing.assert_array_equal(result, x + 2 * y)
    for x, result in zip(a, softs, strict=True):
        np.testing.assert_allclose(result, softmax(x), rtol=1e-6)
    for x, y, result in zip(a, wide, stack, strict=True):
        np.testing.assert_array_equal(result, x @ y)


def test_every_op_and_option_alone(slots):
    rng = np.random.default_rng(1)
    a, b, x = integers(rng, 6, 3), integers(rng, 4, 6), integers(rng, 2, 9)
    bias = torch.arange(4, dtype=torch.float32)
    both = MatmulOptions(transpose_a=True, transpose_b=True)
    cases: list[tuple[str, OpOptions, dict[str, Given], np.ndarray]] = [
        ("matmul", both, {"a": a, "b": b, "bias": bias}, a.T @ b.T + bias.numpy()),
        ("matmul", MatmulOptions(activation="relu"), {"a": b, "b": a}, np.maximum(b @ a, 0)),
        ("softmax", SoftmaxOptions(axis=0), {"x": x}, softmax(x, 0)),
        ("add", AddOptions(alpha=3), {"a": x, "b": x}, 4 * x),
        ("add", AddOptions(), {"a": np.array(2, np.float32), "b": np.array(3, np.float32)}, np.array(5)),
    ]
    for op, options, inputs, expected in cases:
        assert slots.batched.find(slots.alone(op, options, **inputs)) is None
        launch = slots.alone(op, options, **inputs)
        np.testing.assert_allclose(slots.run(slots.batched.find(launch), launch)[0], expected, rtol=1e-6)


FURTHER: list[tuple[str, dict[str, object], dict[str, tuple[int, ...]], tuple[str, ...]]] = [
    ("normalize", {"kind": "layer"}, {"x": (3, 9), "weight": (9,), "bias": (9,)}, ("weight", "bias")),
    ("normalize", {"kind": "l2"}, {"x": (2, 8)}, ()),
    ("reduce", {"kind": "logsumexp"}, {"x": (3, 9)}, ()),
    ("reduce", {"kind": "argmin", "keepdims": True}, {"x": (3, 9)}, ()),
    ("pointwise", {"fn": "mul", "scale": 2, "shift": -1}, {"x": (3, 5), "y": (3, 5)}, ()),
    ("topk", {"k": 3}, {"x": (3, 9)}, ()),
    ("search", {"k": 4, "metric": "dot"}, {"a": (2, 5), "b": (11, 5), "bias": (11,)}, ("b", "bias")),
    ("search", {"k": 4, "metric": "l2"}, {"a": (2, 5), "b": (11, 5)}, ("b",)),
    ("search", {"k": 2, "metric": "cosine"}, {"a": (2, 5), "b": (11, 5)}, ()),
    *(
        (op.name, dict(op.warmup.options), {field: np.shape(rows) for field, rows in op.warmup.inputs.items()}, ())
        for op in OPS.values()
    ),
]


@pytest.mark.parametrize(("op", "options", "shapes", "residents"), FURTHER)
def test_further_ops_give_what_the_cpu_gives_first_and_again_alone_and_together(slots, op, options, shapes, residents):
    rng = np.random.default_rng(len(shapes))
    kept = {name: torch.from_numpy(integers(rng, *shapes[name])) for name in residents}
    own = [name for name in shapes if name not in residents]
    for count in (1, 1, 1, 2, 2):
        jobs = []
        for _ in range(count):
            arrays = {name: rng.permuted(np.arange(np.prod(shapes[name]), dtype=np.float32)) for name in own}
            placed = {name: array.reshape(shapes[name]) for name, array in arrays.items()}
            jobs.append(slots.given(op, parse_options(OPS[op], options), **placed, **kept))
        launches = join(jobs)
        slots.backend.begin(launches).wait()
        wanted = [[tensor_of(out).clone() for out in job.outs] for job in jobs]
        for job in jobs:
            for out in job.outs:
                tensor_of(out).zero_()
        slots.plans.find(launches).run(launches, slots.pipeline).wait()
        for job, results in zip(jobs, wanted, strict=True):
            for out, result in zip(job.outs, results, strict=True):
                torch.testing.assert_close(tensor_of(out), result, rtol=1e-5, atol=1e-4)


def test_a_replaced_resident_is_used_and_the_old_one_is_not(slots):
    a = np.ones((2, 4), np.float32)
    for factor in (1, 5):
        w = torch.full((4, 3), float(factor))
        for _ in range(2):
            launch = slots.alone("matmul", MatmulOptions(), a=a, b=w)
            plan = slots.batched.find(launch)
        np.testing.assert_array_equal(slots.run(plan, launch)[0], np.full((2, 3), 4.0 * factor))


def test_a_batch_under_way_is_left_alone_and_so_many_may_be(slots):
    launch = slots.alone("softmax", SoftmaxOptions(), x=np.ones((2, 4), np.float32))
    assert slots.batched.find(launch) is None
    running, plans = [], []
    for _ in range(MAX_CONCURRENT):
        plan = slots.batched.find(launch)
        assert plan is not None
        plans.append(plan.plan)
        running.append(plan.run([launch], slots.pipeline))
    assert len(set(map(id, plans))) == MAX_CONCURRENT
    assert slots.batched.find(launch) is None
    running[1].wait()
    again = slots.batched.find(launch)
    assert again is not None
    assert again.plan is plans[1]


def test_large_unequal_and_empty_requests_are_not_prepared(slots):
    w = torch.ones(4, 4)
    large = slots.alone("softmax", SoftmaxOptions(), x=np.ones((2, MAX_REQUEST_BYTES // 16 + 1), np.float32))
    empty = slots.alone("matmul", MatmulOptions(), a=np.ones((2, 0), np.float32), b=np.ones((0, 4), np.float32))
    two = [slots.given("matmul", MatmulOptions(), a=np.ones((rows, 4), np.float32), b=w) for rows in (2, 3)]
    for launch in (large, empty, slots.joint(two)):
        assert [slots.batched.find(launch) for _ in range(3)] == [None] * 3


def test_memory_that_the_device_does_not_reach_is_not_prepared(slots):
    launch = Slots().alone("softmax", SoftmaxOptions(), x=np.ones(4, np.float32))
    assert [slots.batched.find(launch) for _ in range(3)] == [None] * 3


def test_an_address_within_a_word_is_not_prepared(slots):
    x = np.ones((2, 4), np.float32)
    for _ in range(2):
        launch = slots.alone("softmax", SoftmaxOptions(), x=x)
        plan = slots.batched.find(launch)
    assert plan is not None
    launch.concatenated["x"][0][0].offset += 4
    assert slots.batched.find(launch) is None


def test_whatever_plan_is_chosen_gives_each_request_its_result(slots):
    """First and again, alone and together, equal and unequal, and in unaligned places."""
    rng = np.random.default_rng(5)
    w = torch.from_numpy(integers(rng, 5, 7))
    for _ in range(3):
        rows = [integers(rng, count, 5) for count in (1, 3, 2)]
        pairs = [(integers(rng, m, 6), integers(rng, 6, n)) for m, n in ((3, 4), (2, 9), (5, 1))]
        batches = [
            ([slots.given("matmul", MatmulOptions(), a=a, b=w) for a in rows], [a @ w.numpy() for a in rows]),
            ([slots.given("matmul", MatmulOptions(), a=a, b=b) for a, b in pairs], [a @ b for a, b in pairs]),
            (
                [slots.given("matmul", MatmulOptions(transpose_b=True), a=a, b=b.T.copy()) for a, b in pairs],
                [a @ b for a, b in pairs],
            ),
            ([slots.given("softmax", SoftmaxOptions(axis=0), x=rows[1])], [softmax(rows[1], 0)]),
        ]
        for jobs, expected in batches:
            launches = join(jobs)
            slots.plans.find(launches).run(launches, slots.pipeline).wait()
            for job, wanted in zip(jobs, expected, strict=True):
                np.testing.assert_allclose(tensor_of(job.outs[0]).numpy(), wanted, rtol=1e-6)


@pytest.mark.parametrize(("rows", "step"), [(8, 4), (7, 3)])
def test_a_request_in_chunks_is_the_whole_request(slots, rows, step):
    rng = np.random.default_rng(rows)
    a, b = integers(rng, rows, 8), integers(rng, 8, 8)
    cases: list[tuple[str, OpOptions, dict[str, Given], np.ndarray, Chunks]] = [
        ("matmul", MatmulOptions(), {"a": a, "b": b}, a @ b, Chunks(("a",), rows, step)),
        ("softmax", SoftmaxOptions(), {"x": a}, softmax(a), Chunks(("x",), rows, step)),
        ("add", AddOptions(), {"a": a, "b": a}, 2 * a, Chunks(("a", "b"), 8 * rows, step, is_flat=True)),
    ]
    for op, options, inputs, expected, chunks in cases:
        launch = slots.alone(op, options, **inputs)
        Chunked(slots.staging, chunks, is_invariant=False).run([launch], slots.pipeline).wait()
        np.testing.assert_allclose(results(launch)[0], expected, rtol=1e-6)


class Sized:
    """A plan of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def test_the_cache_drops_what_was_used_longest_ago():
    cache: PlanCache[Sized] = PlanCache(max_signatures=3, max_bytes=100)
    assert [cache.has_seen(name) for name in "aba"] == [False, False, True]
    cache.add("a", Sized(60))
    cache.add("b", Sized(30))
    assert len(cache.find("a") or ()) == 1
    cache.add("b", Sized(30))
    assert not cache.has_seen("a")
    assert [len(cache.find(name) or ()) for name in "ab"] == [0, 2]
    cache.refuse("b")
    assert cache.find("b") is None
    cache.add("a", Sized(1000))
    assert len(cache.find("a") or ()) == 1
    for name in "cde":
        assert not cache.has_seen(name)
    assert [cache.has_seen(name) for name in "cde"] == [True] * 3
    assert not cache.has_seen("a")
    cache.add("a", Sized(60))
    cache.clear()
    assert [cache.has_seen(name) for name in "ac"] == [False] * 2
    # Nothing counts what was dropped.
    cache.add("a", Sized(60))
    cache.add("c", Sized(40))
    assert [len(cache.find(name) or ()) for name in "ac"] == [1, 1]


def test_a_place_of_a_client_is_no_place_of_the_device():
    """Bytes in a segment that was never registered are left to copies."""
    slots = Slots()
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    launch = slots.alone("softmax", SoftmaxOptions(), x=x)
    elsewhere = HostBytes(torch.from_numpy(x.copy()).view(-1).view(torch.uint8), TensorType("float32", (2, 4)), 0)
    launch.concatenated = {"x": ([elsewhere], (2, 4))}
    slots.plans.find([launch]).run([launch], slots.pipeline).wait()
    np.testing.assert_allclose(results(launch)[0], softmax(x), rtol=1e-6)


# ── results that stay ─────────────────────────────────────────────────────────────────────────────


def kept_by(slots: Slots, job: BoundJob) -> torch.Tensor:
    """Runs a job whose result stays; returns the result."""
    (launch,) = join([job])
    slots.plans.find([launch]).run([launch], slots.pipeline).wait()
    assert job.kept is not None
    assert job.kept.tensor is not None
    return job.kept.tensor


@pytest.mark.parametrize("n", [16, 13], ids=["plain rows", "padded rows"])
def test_a_result_that_stays_is_the_memory_that_the_kernel_wrote(slots: Slots, n: int) -> None:
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((8, 32), dtype=np.float32), rng.standard_normal((32, n), dtype=np.float32)
    end = slots.end
    for _ in range(3):
        # Often enough for a plan that keeps memory, which would write the next result over this one.
        job = slots.storing_job("matmul", MatmulOptions(), "y", a=slots.put(torch.from_numpy(a)), b=torch.from_numpy(b))
        assert job.outs == []
        first = kept_by(slots, job)
        again = slots.storing_job(
            "matmul", MatmulOptions(), "y", a=slots.put(torch.from_numpy(-a)), b=torch.from_numpy(b)
        )
        kept_by(slots, again)
        np.testing.assert_allclose(first.numpy(), a @ b, rtol=1e-4, atol=1e-5)
    assert slots.end == end + 6 * 1024, "Only the operands take room in the segment."
    # It is an operand like any other resident.
    job = slots.given("softmax", SoftmaxOptions(), x=first)
    (launch,) = join([job])
    slots.plans.find([launch]).run([launch], slots.pipeline).wait()
    expected = torch.softmax(torch.from_numpy(a @ b), -1)
    np.testing.assert_allclose(tensor_of(job.outs[0]).numpy(), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_jobs_that_store_run_alone(slots: Slots) -> None:
    x = slots.put(torch.ones(2, 4))
    assert slots.storing_job("softmax", SoftmaxOptions(), "y", x=x).key is None


# ── results beside those of other engines ─────────────────────────────────────────────────────────


def beside(slots: Slots, job: BoundJob, columns: int, begin: int) -> torch.Tensor:
    """Gives a job the columns from `begin` of a wider result; returns that, filled with -7."""
    (out,) = job.outs
    item = TORCH_DTYPES[out.type.dtype].itemsize
    whole = slots.put(torch.full((*out.type.shape[:-1], columns), -7, dtype=TORCH_DTYPES[out.type.dtype]))
    job.outs = [HostBytes(whole.mapped, out.type, whole.offset + begin * item, pitch=columns * item)]
    return tensor_of(whole)


@pytest.mark.parametrize(("width", "columns", "begin"), [(8, 24, 8), (7, 20, 5), (5, 6, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_part_is_written_among_the_columns_of_others(slots, width, columns, begin, dtype):
    """First and again, alone and joined, whatever plan is chosen, and on the CPU backend."""
    rng = np.random.default_rng(width)
    w = torch.from_numpy(integers(rng, 6, width).astype(dtype))
    for count, is_cpu in itertools.product((1, 1, 1, 3, 3), (False, True)):
        rows = [integers(rng, 2, 6).astype(dtype) for _ in range(count)]
        jobs = [slots.given("matmul", MatmulOptions(), a=a, b=w) for a in rows]
        wholes = [beside(slots, job, columns, begin) for job in jobs]
        launches = join(jobs)
        running = slots.backend.begin(launches) if is_cpu else slots.plans.find(launches).run(launches, slots.pipeline)
        running.wait()
        for a, whole in zip(rows, wholes, strict=True):
            np.testing.assert_array_equal(whole[:, begin : begin + width].numpy(), a @ w.numpy())
            assert (whole[:, :begin] == -7).all()
            assert (whole[:, begin + width :] == -7).all()


@pytest.mark.parametrize("is_mapped", [True, False])
def test_a_part_in_chunks_is_written_among_the_columns_of_others(slots, is_mapped):
    rng = np.random.default_rng(3)
    a, b = integers(rng, 7, 8), torch.from_numpy(integers(rng, 8, 8))
    job = slots.given("matmul", MatmulOptions(), a=a, b=b)
    whole = beside(slots, job, 20, 4)
    if not is_mapped:
        slots.staging.remove_mapped(slots.mapped)
    launches = join([job])
    chunked = Chunked(slots.staging, Chunks(("a",), 7, 3), is_invariant=False)
    chunked.run(launches, slots.pipeline).wait()
    np.testing.assert_array_equal(whole[:, 4:12].numpy(), a @ b.numpy())
    assert (whole[:, :4] == -7).all()
    assert (whole[:, 12:] == -7).all()


def test_a_merge_runs_first_and_again(slots):
    options = MergeOptions(3, largest=True, is_nan_large=False, parts=((2, 0), (2, 10)))
    values = np.array([[5, 1, 5, np.nan]], np.float32)
    for _ in range(3):
        launch = slots.alone("merge", options, values=values, indices=np.array([[4, 0, 1, 2]]))
        slots.plans.find([launch]).run([launch], slots.pipeline).wait()
        assert [tensor_of(places[0]).tolist() for places, _ in launch.outputs] == [[[5, 5, 1]], [[4, 11, 0]]]

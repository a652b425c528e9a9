"""Races configurations on the products that a device is really asked for, in short turns between requests.

A race takes the product that took the most time so far. Its candidates are members of the catalogue, which are compiled and
loaded, and the vendor library if asked: nothing is built. They take turns of about a tenth of a millisecond; the slower ones
drop out. A winner that is clearly faster than the present choice, and gives the same numbers, becomes a learned choice.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewire.kernels.matmul.bench import MatmulOperands
from tilewire.kernels.matmul.configs import ACTIVATIONS, VENDOR, Config, Problem, has_vendor
from tilewire.kernels.matmul.members import arithmetic_of, is_possible
from tilewire.kernels.matmul.select import described, ranked, select
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.op import Call
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.learned import Choice, Learned, Product, Reader, today

logger = logging.getLogger(__name__)

# Length of a turn: what a request that comes meanwhile waits for, at most, beside one call of a slow candidate.
TURN_US = 100.0
# Longest predicted call of a product that is raced: a single call is a turn's least.
MAX_CALL_US = 1_000.0
# Device memory of the operands of a race.
MAX_BYTES = 2**28
# Races need so many times that memory to be free.
SPARE = 4
# Candidates of a race: those predicted to take no more than so many times the fastest, and at most this number.
NEAR = 1.6
MAX_CANDIDATES = 24
# Rounds of a race, and how many configurations each leaves beside the present choice.
ROUNDS = ((3, 6), (8, 2), (16, 1))
# A winner takes at most this share of the present choice's time: less is within what two races differ by.
WORTH = 0.97
# Largest relative difference of two right outputs: a wrong one's is near 1, float8 sums in the matrix unit reach 2e-3.
MAX_ERROR = 0.02


class Contestant(Protocol):
    """A configuration that is ready to be timed."""

    def turn_us(self) -> float:
        """Takes one turn; returns the microseconds of one call."""
        ...


class Timer(Protocol):
    """Times calls on a device."""

    def ready(self, call: Call, num_sets: int, expected_us: float) -> Contestant:
        """Prepares a call for its turns.

        Args:
            call: Launches on the operand set of a given number.
            num_sets: Number of operand sets.
            expected_us: Predicted microseconds of one call.
        """
        ...


class Operands(Protocol):
    """Operand sets of one product."""

    @property
    def output(self) -> torch.Tensor:
        """Output of the first set."""
        ...

    def launcher(self, config: Config) -> Call:
        """Launches a configuration on the operand set of a given number."""
        ...

    def poison(self) -> None:
        """Overwrites the first set's output."""
        ...


@dataclass(frozen=True)
class Opened:
    """Operands of a race.

    Attributes:
        operands: The operands.
        num_sets: Number of operand sets.
    """

    operands: Operands
    num_sets: int


class Racer:
    """Runs races, turn by turn, on the thread that owns the device and on its current stream, always the same one.

    Args:
        learned: Receives the choices, and has the counts of launches.
        target: The device.
        timer: Times calls.
        open_operands: Makes the operands of a shape; None where there is no memory for them.
        with_vendor: Whether the vendor library takes part where nothing follows the product.
    """

    def __init__(
        self,
        learned: Learned,
        target: Target,
        timer: Timer,
        open_operands: Callable[[MatmulShape], Opened | None],
        *,
        with_vendor: bool = False,
    ) -> None:
        self._learned = learned
        self._target = target
        self._timer = timer
        self._open = open_operands
        self._with_vendor = with_vendor
        self._race: Generator[None, None, None] | None = None

    def step(self) -> bool:
        """Takes one turn. Returns whether there may be more to do: False until products are launched again."""
        if self._race is not None:
            try:
                next(self._race)
            except StopIteration:
                self._race = None
            return True
        product = self._learned.busiest(self._us_of)
        if product is None:
            return False
        self._race = self._guarded(product)
        return True

    def give_up(self) -> None:
        """Ends the race under way and frees its memory, which a request needs. Its product may be raced again."""
        if self._race is not None:
            self._race.close()
            self._race = None

    def _guarded(self, product: Product) -> Generator[None, None, None]:
        """One race; without memory it ends as if the present choice had won."""
        try:
            yield from self._run(product)
        except torch.OutOfMemoryError:
            logger.warning("no memory to race %s", in_words(product))
            self._learned.settle(product, None)

    def _us_of(self, product: Product) -> float:
        """The least that a product can take: hundreds are compared, and predictions take a millisecond each."""
        problem: Problem = product.problem
        rate = self._target.sm_flops_per_us(arithmetic_of(problem)) * self._target.num_sms
        flops = 2.0 * problem.m * problem.n * problem.k * problem.batch
        return max(flops / rate, problem.min_bytes / self._target.bytes_per_us)

    def _run(self, product: Product) -> Iterator[None]:
        """One race; it yields between turns."""
        shape = shape_of(product)
        found = ranked(product.problem, self._target, is_plain=product.is_plain)
        if shape is None or not found or found[0][0] > MAX_CALL_US or shape.num_bytes > MAX_BYTES:
            self._learned.settle(product, None)
            return
        yield
        present: Config = select(product.problem, self._target, is_plain=product.is_plain)
        near = [config for us, config in found if us <= NEAR * found[0][0]][:MAX_CANDIDATES]
        if self._with_vendor and has_vendor(product.problem, is_plain=product.is_plain):
            near.append(VENDOR)
        predicted = {config: us for us, config in found}
        opened = self._open(shape)
        if opened is None:
            self._learned.settle(product, None)
            return
        yield
        runs: dict[Config, Contestant] = {}
        for config in dict.fromkeys((present, *near)):
            call = opened.operands.launcher(config)
            runs[config] = self._timer.ready(call, opened.num_sets, predicted.get(config, found[0][0]))
            yield
        samples: dict[Config, list[float]] = {config: [] for config in runs}
        for rounds, num_left in ROUNDS:
            for _ in range(rounds):
                for config, taken in samples.items():
                    taken.append(runs[config].turn_us())
                    yield
            best = sorted(samples, key=lambda config: statistics.median(samples[config]))[:num_left]
            samples = {config: samples[config] for config in dict.fromkeys((present, *best))}
        (winner,) = best
        us, before_us = statistics.median(samples[winner]), statistics.median(samples[present])
        if winner == present or us > WORTH * before_us or not _agree(opened.operands, present, winner):
            self._learned.settle(product, None)
            return
        logger.info(
            "learned: %s takes %.1f us with %s, %.1f with %s",
            in_words(product),
            us,
            described(winner),
            before_us,
            described(present),
        )
        self._learned.settle(product, Choice(winner, us, before_us, today()))


def _agree(operands: Operands, present: Config, winner: Config) -> bool:
    """Whether two configurations give the same output, but for rounding."""
    outputs = []
    for config in (present, winner):
        operands.poison()
        operands.launcher(config)(0)
        outputs.append(operands.output.to(torch.float32, copy=True))
    expected, found = outputs
    do_agree = float((found - expected).norm()) <= MAX_ERROR * float(expected.norm())
    if not do_agree:
        logger.error("kernels give different products: %s, %s", described(present), described(winner))
    return do_agree


def shape_of(product: Product) -> MatmulShape | None:
    """The shape whose problem is that of a product; None where none has it: operands that lie as no shape does."""
    problem: Problem = product.problem
    if "any" in (problem.a_major, problem.b_major):
        return None
    activation = ACTIVATIONS[0] if product.is_plain else "relu"
    for is_padded in (True, False):
        shape = MatmulShape(
            problem.m,
            problem.n,
            problem.k,
            problem.batch,
            problem.dtype,
            problem.out_dtype,
            problem.precision,
            problem.a_major,
            problem.b_major,
            is_padded,
            activation,
        )
        if shape.problem == problem:
            return shape
    return None


def in_words(product: Product) -> str:
    """A product in a few words."""
    problem: Problem = product.problem
    batch = f"{problem.batch}x" if problem.batch > 1 else ""
    words = [f"{batch}{problem.m}x{problem.n}x{problem.k}", problem.dtype, f"{problem.a_major}{problem.b_major}"]
    if problem.precision != "ieee":
        words.append(problem.precision)
    return " ".join([*words, *([] if product.is_plain else ["with an epilogue"])])


def choices_of(learned: Learned) -> list[dict[str, object]]:
    """Every choice in words and microseconds, for people and dashboards."""
    return [
        {
            "op": MatmulShape.op,
            "key": in_words(product),
            "config": described(choice.config),
            "us": round(choice.us, 3),
            "before_us": round(choice.before_us, 3),
            "date": choice.date,
        }
        for product, choice in learned.choices.items()
    ]


def reader_for(target: Target, *, with_vendor: bool = False) -> Reader:
    """A reader of kept choices that takes what this build's catalogue still has for `target`; the vendor library if asked."""

    def read(problem_fields: dict[str, Any], is_plain: bool, config_fields: dict[str, Any]) -> tuple[Product, Config]:
        problem, config = Problem(**problem_fields), Config(**config_fields)
        is_vendors = with_vendor and config == VENDOR and has_vendor(problem, is_plain=is_plain)
        if not is_vendors and (config == VENDOR or not is_possible(problem, config, target, is_plain=is_plain)):
            raise ValueError("the catalogue has no such configuration for this product")
        return Product(problem, is_plain), config

    return read


class GraphTimer:
    """Times calls on the current stream by events around a graph of them: the host's time for a launch is not in the figure."""

    def ready(self, call: Call, num_sets: int, expected_us: float) -> Contestant:
        """Captures as many calls as fill a turn."""
        num_calls = max(1, min(64, round(TURN_US / max(expected_us, 1.0))))
        # Scratch memory must be there before a capture.
        call(0)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads copy and allocate meanwhile, on streams of their own.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for number in range(num_calls):
                call(number % num_sets)
        finally:
            graph.capture_end()
        return _Graphed(graph, num_calls)


class _Graphed:
    """A graph of calls.

    Args:
        graph: The graph.
        num_calls: Number of calls in it.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, num_calls: int) -> None:
        self._graph, self._num_calls = graph, num_calls
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def turn_us(self) -> float:
        self._begin.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end) * 1e3 / self._num_calls)


def open_on(device: torch.device) -> Callable[[MatmulShape], Opened | None]:
    """Makes operands on a GPU: as many sets as outgrow its L2 cache, within `MAX_BYTES` and what requests leave free."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def opened(shape: MatmulShape) -> Opened | None:
        if torch.cuda.mem_get_info(device)[0] < SPARE * MAX_BYTES:
            return None
        num_sets = max(1, min(-(-2 * l2_bytes // shape.num_bytes), MAX_BYTES // shape.num_bytes, 16))
        return Opened(MatmulOperands(shape, num_sets, torch.Generator(device).manual_seed(0)), num_sets)

    return opened

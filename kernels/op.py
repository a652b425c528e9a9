"""Defines `KernelOp`, one op of the kernels. Its docstring says how to add an op.

Imports no op. `kernels.registry` lists the ops; catalogue, compilation, self-test, report, benchmarks and tuning iterate
over that list and name none.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

import torch

from tilewire.kernels.runtime.launch import Variant
from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.cost_model import Model

# A configuration of an op: a frozen dataclass of its own.
Config: TypeAlias = Any
# Launches on the operand set of the given number.
Call: TypeAlias = Callable[[int], object]


@dataclass(frozen=True)
class SelfTest:
    """One binary of the self-test, and whether it gave what it should.

    Attributes:
        variants: Binaries that were launched.
        is_right: Boolean tensor of one element, on the device.
        held: Host memory that a launch reads; it stays alive until the launch has run.
    """

    variants: tuple[Variant, ...]
    is_right: torch.Tensor
    held: torch.Tensor | None = None


@dataclass(frozen=True)
class TableEntry:
    """One line of a tuned table, for people and dashboards.

    Attributes:
        op: Name of the op.
        key: Place in the table, in words.
        config: Configuration, in words.
        figure: Measured figure; None for an entry that only states a choice.
        unit: Unit of the figure.
    """

    op: str
    key: str
    config: str
    figure: float | None = None
    unit: str = ""


class ShapeError(ValueError):
    """A shape that an op does not compute; the message names the field."""


class Shape(Protocol):
    """One case of an op, as benchmarks and tuning describe it: a frozen dataclass of ints, bools and strings. Pure.

    Attributes:
        op: Name of the op.
        choices: Allowed values of the fields that are strings.
    """

    op: ClassVar[str]
    choices: ClassVar[Mapping[str, Sequence[str]]]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def __hash__(self) -> int:
        """Equal shapes have equal hashes."""

    @property
    def num_bytes(self) -> int:
        """Each operand read once and each output written once."""

    def check(self) -> None:
        """Raises `ShapeError` where fields contradict one another."""

    def chosen(self, target: Target) -> Config:
        """The configuration that dispatch gives this shape."""

    def candidates(self, target: Target) -> Iterable[Config]:
        """Every configuration of the catalogue that can compute this shape."""


class Operands(Protocol):
    """Operand sets of one shape on a device, for timing."""

    def launcher(self, config: Config | None) -> Call:
        """Launches one configuration, or the one that dispatch gives."""

    def vendors(self) -> Mapping[str, Call]:
        """Launches what others have for the shape, by name; empty where they have nothing."""

    def error(self) -> torch.Tensor | None:
        """Relative error (Frobenius norm) of the first set's output, on the device; None without a reference."""

    def poison(self) -> None:
        """Overwrites the first set's output."""


@dataclass(frozen=True)
class ShapeGroup:
    """A kind of random shapes that benchmarks report on its own.

    Attributes:
        name: Name of the group.
        draw: One random shape.
        count: Number of shapes to measure for a device.
    """

    name: str
    draw: Callable[[random.Random], Any]
    count: int


@dataclass(frozen=True, eq=False)
class Tuning:
    """Measurement, fitting and table of an op's configurations.

    Attributes:
        space: Configurations worth measuring for a shape, whether the catalogue has them or not.
        model: Terms of the predicted time.
        amounts: Amount of each term in a launch: (shape, configuration, programs on a multiprocessor, target).
        key: Section of the table for a shape; empty where its configurations are not tuned.
        entry_of: The part of a configuration that has an entry of its own: without splits.
        is_common: Whether every entry is built for a shape, and not only those for all layouts.
        sizes: Limits of a key: largest number of entries, of those for all layouts, and smallest gain of a further one.
        config: Type of the configurations.
        is_supported: Whether a target has kernels for a shape.
        facts: Facts that correct predicted times: (shape, configuration, programs on a multiprocessor, target). A named tuple;
            None for an op whose times are not corrected.
        binary: Name of an entry's binary for a shape, among those whose resources may differ: (shape, configuration).
        keeps: Whether entries of the table stay, so that sizes which were not measured have one.
    """

    space: Callable[[Any, Target], Iterable[Config]]
    model: Model
    amounts: Callable[[Any, Config, int, Target], tuple[float, ...]]
    key: Callable[[Any], str]
    entry_of: Callable[[Config], Config]
    is_common: Callable[[Any, Target], bool]
    sizes: Callable[[str], tuple[int, int, float]]
    config: type[Any]
    facts: Callable[[Any, Config, int, Target], Any] | None = None
    is_supported: Callable[[Any, Target], bool] = lambda _shape, _target: True
    binary: Callable[[Any, Config], str] = lambda _shape, _config: ""
    keeps: bool = False


@dataclass(frozen=True)
class Family:
    """Binaries of an op that are listed, built and tried alike.

    Attributes:
        members: Arguments of the other two, for each binary that can be chosen on a target.
        build: The binary, or binaries, of a member: (*member, target).
        self_test: Launches them on a device, and compares with what is known: (*member, device).
    """

    members: Callable[[Target], Iterable[tuple[Any, ...]]]
    build: Callable[..., Variant | Iterable[Variant]]
    self_test: Callable[..., SelfTest]


@dataclass(frozen=True, eq=False)
class KernelOp:
    """One op of the kernels.

    To add an op, write a folder `kernels/<op>/`, then add its object and its functions to `kernels.registry`:

    | file | content |
    |---|---|
    | `kernel.py` | the `@triton.jit` bodies; they begin with `await_previous(OVERLAP)` |
    | `op.py` | `Problem`: facts on which a choice depends; `Config`: blocks |
    | `op.py` | `choose(problem, target)`: a configuration; `enumerate_configs(target)`: all that it can choose |
    | `op.py` | `build(problem, config, target)`: the `Variant` of a choice |
    | `op.py` | the public function, and `prepare_<op>`: checks operands once, and returns their launcher |
    | `op.py` | `self_test(problem, config, device)`: launches a binary on numbers whose result is exact |
    | `op.py` | `<op>_reference`: the float64 oracle of self-test, tests and benchmarks |
    | `__init__.py` | the `KernelOp`, with the families of its binaries |

    A long choice has a file `configs.py`, without torch and Triton. An op that is measured has `bench.py`: a `Shape`, groups
    of random ones, its `Operands` and, where it is tuned, its `Tuning`.

    Element-wise ops take blocks and walks from `runtime/elementwise.py` and `walks.py`, and tiles from `add/kernel.py`.

    Rules that hold for all:
    - Sizes and strides are passed at run time, in units of 16 bytes where operands are aligned. No argument is specialised.
    - `choose` gives only members of `variants(target)`; a property test checks that for each target.
    - The public function checks shapes and dtypes and raises `ValueError` that begins with the argument's name.
    - Equal requests give equal bits. No atomics on floats.

    Attributes:
        name: Name of the op, as in metrics and tables. Those of its Triton functions begin with it.
        families: Every binary that the op can launch.
        shape: Shapes of benchmarks and tuning; None for an op that neither measures.
        binaries: Binaries that a configuration launches for a shape, in order.
        groups: Kinds of random shapes that benchmarks report on their own.
        operands: Operand sets: (shape, number of sets, generator on the device).
        tuning: Measurement and fitting of configurations; None for an op whose choice is fixed.
        explain: One line on why a shape gets its configuration; None where there is nothing to say.
        table_entries: Lines of the op's section of a tuned table.
    """

    name: str
    families: tuple[Family, ...]
    shape: type[Any] | None = None
    binaries: Callable[[Any, Config, Target], tuple[Variant, ...]] | None = None
    groups: tuple[ShapeGroup, ...] = ()
    operands: Callable[[Any, int, torch.Generator], Operands] | None = None
    tuning: Tuning | None = None
    explain: Callable[[Any, Target], str] | None = None
    table_entries: Callable[[Any], Iterator[TableEntry]] = lambda _section: iter(())

    def variants(self, target: Target) -> tuple[Variant, ...]:
        """Every binary that the op can launch on `target`, without repeats."""
        found: dict[Variant, None] = {}
        for family in self.families:
            for member in family.members(target):
                built = family.build(*member, target)
                found |= dict.fromkeys((built,) if isinstance(built, Variant) else built)
        return tuple(found)

    def self_tests(self, target: Target, device: torch.device) -> Iterator[Callable[[], SelfTest]]:
        """Yields one call for each binary of `target`, which launches it on `device` and checks it."""
        for family in self.families:
            for member in dict.fromkeys(family.members(target)):
                yield functools.partial(family.self_test, *member, device)


def config_text(config: Config) -> str:
    """A configuration as one short string."""
    return ",".join(str(int(value) if isinstance(value, bool) else value) for value in dataclasses.astuple(config))


def config_from(kind: type[Any], text: str) -> Config:
    """The configuration that `config_text` wrote; fields that were added behind it since have their defaults."""
    read: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "bool": lambda value: value == "1"}
    fields, values = dataclasses.fields(kind), text.split(",")
    if len(values) > len(fields):
        raise ValueError(f"{text}: more fields than {kind.__name__} has")
    return kind(**{field.name: read[str(field.type)](value) for field, value in zip(fields, values, strict=False)})


def log_uniform(generator: random.Random, least: int, most: int) -> int:
    """A random whole number whose logarithm is uniform."""
    return round(math.exp(generator.uniform(math.log(least), math.log(most))))


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers; 1 of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0

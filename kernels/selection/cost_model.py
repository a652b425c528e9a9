"""The time that a launch takes, as a sum of named terms. Pure; imports no op.

An op gives the amount of each term in a launch. It is the microseconds of its bytes or multiplications at the device's
full rate, or a count of sequential steps. A table holds the cost of one unit of each term for each configuration: a
factor for the former, microseconds for the latter. What one term hides of another is in the factors. What sums of terms
cannot say is in a correction.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeAlias

from tilewire.kernels.selection.correction import Correction

Amounts: TypeAlias = tuple[float, ...]


class Term(NamedTuple):
    """One term of a model.

    Attributes:
        name: Name, as in tables and explanations.
        unit: Unit of its amount.
        default: Cost of one unit where nothing was measured.
    """

    name: str
    unit: str
    default: float


class Model:
    """The terms of one op.

    Args:
        *terms: In the order of amounts and costs.
    """

    def __init__(self, *terms: Term) -> None:
        self.terms = terms

    def costs(self, found: Mapping[str, float], defaults: Mapping[str, float]) -> Amounts:
        """Costs by term: those of a configuration, else those of its kind, else the built-in ones."""
        return tuple(found.get(term.name, defaults.get(term.name, term.default)) for term in self.terms)

    def us(self, costs: Amounts, amounts: Amounts) -> float:
        """Predicted microseconds."""
        return float(sum(map(operator.mul, costs, amounts)))

    def explained(self, costs: Amounts, amounts: Amounts) -> str:
        """The terms that take time, in microseconds, largest first."""
        found = [(cost * amount, term) for cost, amount, term in zip(costs, amounts, self.terms, strict=True)]
        shown = sorted((each for each in found if each[0] >= _SHOWN_US), key=lambda each: -each[0])
        return ", ".join(f"{term.name} {us:.1f}" for us, term in shown)


_SHOWN_US = 0.05


@dataclass(frozen=True)
class Tile:
    """A configuration of a device's table.

    Attributes:
        config: With one split.
        costs: Cost of each term of the op's model.
        occupancy: Programs that run on one multiprocessor at a time.
        occupancies: The same by name of binaries for which it differs.
        correction: How its predicted times are corrected, as those of the whole section are.
        store: Store of a product that it is for; empty for each that its kernel has.
        all_layouts: Whether its binary is built for every layout, store and pair of types, not only for the most common.
    """

    config: Any
    costs: Amounts
    occupancy: int = 1
    store: str = ""
    all_layouts: bool = False
    occupancies: tuple[tuple[str, int], ...] = ()
    correction: Correction = field(default=(), compare=False, repr=False)

    def in_binary(self, name: str) -> Tile:
        """The tile as the binary of this name has it."""
        return replace(self, occupancy=dict(self.occupancies).get(name, self.occupancy))


def tile_of(
    kind: type[Any], model: Model, entry: Mapping[str, Any], defaults: Mapping[str, float], store: str = ""
) -> Tile:
    """The tile that an entry of a table describes.

    Args:
        kind: Type of the op's configurations.
        model: The op's.
        entry: Fields of the configuration by name, and `costs`, `occupancy`, `occupancies` and `all_layouts` where they
            were measured.
        defaults: Costs of the entry's section.
        store: Store that it is for.
    """
    config = kind(**{field.name: entry[field.name] for field in fields(kind) if field.name in entry})
    costs = model.costs(entry.get("costs", {}), defaults)
    occupancies = tuple(entry.get("occupancies", {}).items())
    return Tile(config, costs, entry.get("occupancy", 1), store, entry.get("all_layouts", False), occupancies)

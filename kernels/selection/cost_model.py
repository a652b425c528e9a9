"""The time that a launch takes, as a sum of named terms. Pure; imports no op.

An op gives the amount of each term in a launch. It is the microseconds of its bytes or multiplications at the device's
full rate, or a count of sequential steps. A table holds the cost of one unit of each term for each configuration: a
factor near 1 for the former, microseconds for the latter. Overlapped terms hide behind the longest of them; the others
add up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeAlias

Amounts: TypeAlias = tuple[float, ...]

# The larger, the better the longest of the overlapped terms hides the others.
SHARPNESS = 4


class Term(NamedTuple):
    """One term of a model.

    Attributes:
        name: Name, as in tables and explanations.
        unit: Unit of its amount.
        default: Cost of one unit where nothing was measured.
        is_overlapped: Whether it hides behind the longest of its kind.
    """

    name: str
    unit: str
    default: float
    is_overlapped: bool = False


class Model:
    """The terms of one op.

    Args:
        *terms: The overlapped ones last.
    """

    def __init__(self, *terms: Term) -> None:
        self.terms = terms
        self.first = sum(not term.is_overlapped for term in terms)
        assert not any(term.is_overlapped for term in terms[: self.first]), "This is a bug."

    def costs(self, found: Mapping[str, float], defaults: Mapping[str, float]) -> Amounts:
        """Costs by term: those of a configuration, else those of its kind, else the built-in ones."""
        return tuple(found.get(term.name, defaults.get(term.name, term.default)) for term in self.terms)

    def us(self, costs: Amounts, amounts: Amounts) -> float:
        """Predicted microseconds."""
        total = hidden = 0.0
        for index, (cost, amount) in enumerate(zip(costs, amounts, strict=True)):
            if amount:
                if index < self.first:
                    total += cost * amount
                else:
                    hidden += (cost * amount) ** SHARPNESS
        return float(total + hidden ** (1 / SHARPNESS))

    def explained(self, costs: Amounts, amounts: Amounts) -> str:
        """The terms that take time, in microseconds, largest first."""
        found = [(cost * amount, term) for cost, amount, term in zip(costs, amounts, self.terms, strict=True)]
        shown = sorted((each for each in found if each[0] >= _SHOWN_US), key=lambda each: -each[0])
        return ", ".join(f"{term.name} {us:.1f}{' (overlapped)' if term.is_overlapped else ''}" for us, term in shown)


_SHOWN_US = 0.05


@dataclass(frozen=True)
class Tile:
    """A configuration of a device's table.

    Attributes:
        config: With one split.
        costs: Cost of each term of the op's model.
        occupancy: Programs that run on one multiprocessor at a time.
        store: Store of a product that it is for; empty for each that its kernel has.
        all_layouts: Whether its binary is built for every layout, store and pair of types, not only for the most common.
    """

    config: Any
    costs: Amounts
    occupancy: int = 1
    store: str = ""
    all_layouts: bool = False


def tile_of(
    kind: type[Any], model: Model, entry: Mapping[str, Any], defaults: Mapping[str, float], store: str = ""
) -> Tile:
    """The tile that an entry of a table describes.

    Args:
        kind: Type of the op's configurations.
        model: The op's.
        entry: Fields of the configuration by name, and `costs`, `occupancy` and `all_layouts` where they were measured.
        defaults: Costs of the entry's section.
        store: Store that it is for.
    """
    config = kind(**{field.name: entry[field.name] for field in fields(kind) if field.name in entry})
    costs = model.costs(entry.get("costs", {}), defaults)
    return Tile(config, costs, entry.get("occupancy", 1), store, entry.get("all_layouts", False))

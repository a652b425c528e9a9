"""The time that a launch takes, as a sum of named terms. Pure; imports no op.

An op gives the amount of each term in a launch. It is the microseconds of its bytes or multiplications at the device's
full rate, or a count of sequential steps. A table holds the cost of one unit of each term for each configuration: a
factor near 1 for the former, microseconds for the latter. Overlapped terms hide behind the longest of them; the others
add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

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


def least(us: Sequence[float]) -> int:
    """The number of the smallest."""
    return min(range(len(us)), key=us.__getitem__)

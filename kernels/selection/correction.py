"""What the terms of a predicted time leave unexplained, learned from measurements. Pure; imports no op.

A correction is a number of trees of questions about a launch: is this fact of it at most so much? Each way through a tree
ends in a number. Their sum is the logarithm of the time over the predicted one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

# Predictions of up to so many times the least are corrected. From others nothing is learned.
NEAR = 1.4
# A number, or (fact, most, the tree where the fact is at most that, the tree where it is more). Facts are numbered.
Tree: TypeAlias = Any
Correction: TypeAlias = tuple[Tree, ...]


def factor(correction: Correction, facts: Sequence[float]) -> float:
    """Time over the predicted one of a launch with these facts; 1 without trees."""
    total = 0.0
    for each in correction:
        tree = each
        while not isinstance(tree, float):
            number, most, below, above = tree
            tree = below if facts[number] <= most else above
        total += tree
    return math.exp(total)


def correction_of(section: Mapping[str, Any], names: Sequence[str]) -> Correction:
    """The correction of a section of a table, for facts in the order of `names`; without trees where it has none.

    Raises:
        ValueError: It asks for a fact that there is not.
    """
    found = section.get("correction", {"facts": (), "trees": ()})
    unknown = [name for name in found["facts"] if name not in names]
    if unknown:
        raise ValueError(f"correction: there is no fact {', '.join(unknown)}")
    numbers = [names.index(name) for name in found["facts"]]
    return tuple(_tree(each, numbers) for each in found["trees"])


def _tree(entry: Any, numbers: Sequence[int]) -> Tree:
    if not isinstance(entry, list):
        return float(entry)
    fact, most, below, above = entry
    return numbers[fact], float(most), _tree(below, numbers), _tree(above, numbers)

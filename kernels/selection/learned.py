"""Choices that were measured on a device while it served, and the launches that they are worth measuring for. Pure: no torch.

A learned choice wins over every prediction and yields to an override of the table. Nothing is learned, and nothing counted,
before a `Learned` is installed for a target.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from tilewire.kernels.runtime.targets import Target
from tilewire.kernels.selection.tables import write_atomically

logger = logging.getLogger(__name__)

# Bounds of memory and of the file: a service asks for some dozen products, each at several numbers of rows.
MAX_COUNTED = 512
MAX_LEARNED = 1024


class Product(NamedTuple):
    """A product as far as the choice of its kernel goes.

    Attributes:
        problem: Sizes, dtypes and layouts; the op's own dataclass.
        is_plain: Whether nothing follows the product.
    """

    problem: Any
    is_plain: bool


@dataclass(slots=True)
class Calls:
    """Launches of one product; those that were prepared share one.

    Attributes:
        count: Number of launches.
        is_raced: Whether the product's race is over.
    """

    count: int = 0
    is_raced: bool = False


@dataclass(frozen=True)
class Choice:
    """A configuration that won a race.

    Attributes:
        config: The configuration.
        us: Its microseconds.
        before_us: Those of the configuration that was chosen before, in the same race.
        date: Day of the race, as YYYY-MM-DD.
    """

    config: Any
    us: float
    before_us: float
    date: str


# Reads a product and a configuration from their fields; raises `TypeError` or `ValueError` where they are none of this build.
Reader = Callable[[dict[str, Any], bool, dict[str, Any]], tuple[Product, Any]]


class Learned:
    """Holds the learned configurations of one device, and counts its launches.

    Args:
        path: File that keeps it; None for memory alone.
        max_counted: Number of products whose launches are counted; past it the one with the fewest is forgotten, and
            that it was raced.
        max_learned: Number of choices; past it the oldest is dropped.

    Attributes:
        version: Grows with each choice: launches that were prepared under an older one may be out of date.
    """

    def __init__(
        self, path: Path | None = None, *, max_counted: int = MAX_COUNTED, max_learned: int = MAX_LEARNED
    ) -> None:
        self.version = 0
        self._path = path
        self._max_counted, self._max_learned = max_counted, max_learned
        self._choices: dict[Product, Choice] = {}
        self._calls: dict[Product, Calls] = {}

    @property
    def choices(self) -> dict[Product, Choice]:
        """Every choice, oldest first."""
        return dict(self._choices)

    def find(self, product: Product) -> Any | None:
        """The learned configuration of a product, or None."""
        found = self._choices.get(product)
        return None if found is None else found.config

    def calls_of(self, product: Product) -> Calls:
        """The counter of a product's launches."""
        found = self._calls.get(product)
        if found is None:
            if len(self._calls) >= self._max_counted:
                del self._calls[min(self._calls, key=lambda one: self._calls[one].count)]
            found = self._calls[product] = Calls()
        return found

    def busiest(self, us_of: Callable[[Product], float]) -> Product | None:
        """The product that took the most time of those that were not raced and have no choice yet, or None.

        Args:
            us_of: Expected microseconds of one launch.
        """
        open_ = [
            one for one, calls in self._calls.items() if calls.count and not calls.is_raced and one not in self._choices
        ]
        return max(open_, key=lambda one: self._calls[one].count * us_of(one), default=None)

    def settle(self, product: Product, choice: Choice | None) -> None:
        """Ends a product's race: it is not raced again while its launches are counted.

        Args:
            product: The product.
            choice: The winner; None where the choice stays as it was.
        """
        if (calls := self._calls.get(product)) is not None:
            calls.is_raced = True
        if choice is None:
            return
        self.version += 1
        self._choices.pop(product, None)
        self._choices[product] = choice
        while len(self._choices) > self._max_learned:
            del self._choices[next(iter(self._choices))]
        self._save()

    def load(self, read: Reader) -> int:
        """Reads what the file has; entries that are no choice of this build are left out.

        Args:
            read: Reads an entry.

        Returns:
            Number of choices.
        """
        for entry in _entries(self._path):
            try:
                product, config = read(entry["problem"], bool(entry["is_plain"]), entry["config"])
                choice = Choice(config, float(entry["us"]), float(entry["before_us"]), str(entry["date"]))
            except (KeyError, TypeError, ValueError):
                continue
            self._choices[product] = choice
        return len(self._choices)

    def _save(self) -> None:
        """Writes all, with what others have written since. Where that cannot be written, choices stay in memory alone."""
        if self._path is None:
            return
        mine = [_entry(product, choice) for product, choice in self._choices.items()]
        keys = {_key(entry) for entry in mine}
        others = [entry for entry in _entries(self._path) if _key(entry) not in keys]
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps({"choices": [*others, *mine][-self._max_learned :]}, indent=1))
        except OSError as error:
            logger.warning("choices are not kept: %s", error)
            self._path = None


def today() -> str:
    """The day of a race."""
    return datetime.now(UTC).date().isoformat()


_installed: dict[Target, Learned] = {}


def install(target: Target, learned: Learned | None) -> None:
    """Has dispatch use and count for a target; None ends that. Launches prepared before are neither changed nor counted."""
    if learned is None:
        _installed.pop(target, None)
    else:
        _installed[target] = learned


def learned_for(target: Target) -> Learned | None:
    """Returns the choices that are installed for a target, or None."""
    # A target takes as long to hash as a launch to look up.
    return _installed.get(target) if _installed else None


def _entry(product: Product, choice: Choice) -> dict[str, Any]:
    return {
        "problem": asdict(product.problem),
        "is_plain": product.is_plain,
        "config": asdict(choice.config),
        "us": round(choice.us, 3),
        "before_us": round(choice.before_us, 3),
        "date": choice.date,
    }


def _key(entry: dict[str, Any]) -> str:
    return json.dumps([entry.get("problem"), entry.get("is_plain")], sort_keys=True)


def _entries(path: Path | None) -> list[dict[str, Any]]:
    """The entries of a file; none where it is missing or damaged."""
    try:
        text = "" if path is None else path.read_text()
        found = json.loads(text or "{}")
    except (OSError, ValueError):
        return []
    entries = found.get("choices", []) if isinstance(found, dict) else []
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []

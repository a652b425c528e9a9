"""The interface of a launch plan, which runs a batch on the device, and the cache of those that keep memory there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from tilewire.service.engine.backends.contract import LaunchSpec
from tilewire.service.engine.backends.gpu.pipeline import InFlight, Pipeline


class LaunchPlan(Protocol):
    """One way to run a batch."""

    def run(self, launches: Sequence[LaunchSpec], pipeline: Pipeline) -> InFlight:
        """Queues copies and kernels; returns before they have run.

        Args:
            launches: The batch, with the addresses of its operands and results.
            pipeline: Streams and events.
        """
        ...


class Keepable(Protocol):
    """A launch plan that holds memory on the device.

    Attributes:
        nbytes: Bytes of memory on the device.
    """

    nbytes: int


PlanT = TypeVar("PlanT", bound=Keepable)


class PlanCache(Generic[PlanT]):
    """Caches launch plans by signature: least recently used, bounded in count and in bytes.

    Args:
        max_signatures: Largest number of signatures, those that came once among them.
        max_bytes: Largest number of bytes of all plans together; the plans of the newest signature always stay.
    """

    def __init__(self, max_signatures: int, max_bytes: int) -> None:
        self._max_signatures = max_signatures
        self._max_bytes = max_bytes
        self._nbytes = 0
        self._plans: OrderedDict[Hashable, list[PlanT] | None] = OrderedDict()

    def find(self, signature: Hashable) -> list[PlanT] | None:
        """Returns the plans of a signature, which came before; an empty list when it did not, None when it cannot have any."""
        if signature not in self._plans:
            return []
        self._plans.move_to_end(signature)
        return self._plans[signature]

    def has_seen(self, signature: Hashable) -> bool:
        """Whether a signature came before; from now on it has."""
        if signature in self._plans:
            return True
        self._plans[signature] = []
        self._evict()
        return False

    def refuse(self, signature: Hashable) -> None:
        """Notes that a signature cannot have plans."""
        self._drop(signature)
        self._plans[signature] = None
        self._evict()

    def add(self, signature: Hashable, plan: PlanT) -> None:
        """Keeps one more plan of a signature."""
        plans = self._plans.setdefault(signature, [])
        assert plans is not None, "This is a bug: a plan for a signature that cannot have any."
        plans.append(plan)
        self._plans.move_to_end(signature)
        self._nbytes += plan.nbytes
        self._evict()

    def remove(self, signature: Hashable, plan: PlanT) -> None:
        """Drops one plan; a batch that runs it holds it until it is over."""
        plans = self._plans[signature]
        assert plans is not None, "This is a bug."
        plans.remove(plan)
        self._nbytes -= plan.nbytes

    def clear(self) -> None:
        """Drops every plan, and forgets which signatures came."""
        self._plans.clear()
        self._nbytes = 0

    def _evict(self) -> None:
        while len(self._plans) > 1 and (len(self._plans) > self._max_signatures or self._nbytes > self._max_bytes):
            self._drop(next(iter(self._plans)))

    def _drop(self, signature: Hashable) -> None:
        for plan in self._plans.pop(signature, None) or ():
            self._nbytes -= plan.nbytes

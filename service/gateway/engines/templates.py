"""Numbers the templates of this gateway's jobs: equal templates have one number, and an engine is sent each once.

Runs in the gateway's event loop.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from tilewire.service.ipc.messages import InputSpec, OutputSpec, Template, encode_message
from tilewire.service.ops.registry import Options

# Bounds of the templates that a gateway keeps, and that an engine keeps for it. As messages most have some 150 bytes; one of a
# program has its text, and an engine takes six times the bytes of that.
MAX_TEMPLATES, MAX_BYTES = 4096, 2**23

KeyT = TypeVar("KeyT", bound=Hashable)


class Outputs(NamedTuple):
    """Outputs of a template, and the cost of one job of it.

    Attributes:
        specs: Outputs in the order of the op's.
        flops: Operations.
        moved_bytes: Bytes that are read and written.
    """

    specs: tuple[OutputSpec, ...]
    flops: int
    moved_bytes: int


class KeptTemplates(Generic[KeyT]):
    """Templates by some key, within the bounds: the ones that were used longest ago are dropped."""

    def __init__(self, max_templates: int = MAX_TEMPLATES, max_bytes: int = MAX_BYTES) -> None:
        self._max_templates = max_templates
        self._max_bytes = max_bytes
        # With their bytes as messages.
        self._kept: OrderedDict[KeyT, tuple[Template, int]] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, key: KeyT) -> Template | None:
        """Returns a template, which is now the last one that was used; None without one."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        self._kept.move_to_end(key)
        return kept[0]

    def add(self, key: KeyT, template: Template) -> list[Template]:
        """Adds a template under a new key; returns those that are dropped for it."""
        nbytes = len(bytes(encode_message(template)))
        self._kept[key] = template, nbytes
        self._nbytes += nbytes
        dropped: list[Template] = []
        while len(self._kept) > 1 and (len(self._kept) > self._max_templates or self._nbytes > self._max_bytes):
            _, (oldest, oldest_bytes) = self._kept.popitem(last=False)
            self._nbytes -= oldest_bytes
            dropped.append(oldest)
        return dropped

    def clear(self) -> None:
        """Drops all."""
        self._kept.clear()
        self._nbytes = 0


class Templates:
    """Caches templates by value."""

    def __init__(self, max_templates: int = MAX_TEMPLATES, max_bytes: int = MAX_BYTES) -> None:
        # Never given twice: an engine may still hold a job of an old one.
        self._ids = itertools.count(1)
        self._by_value: KeptTemplates[Hashable] = KeptTemplates(max_templates, max_bytes)

    def find(
        self,
        op: str,
        inputs: tuple[InputSpec, ...],
        options: Options,
        destination: Hashable,
        plan: Callable[[], Outputs],
    ) -> Template:
        """Returns the template of these values, numbered.

        Args:
            op: Name of the op.
            inputs: Inputs in order.
            options: Options of the op.
            destination: Where the outputs go; with the values before, it determines what `plan` returns.
            plan: Works out outputs and cost; called only when no template with these values is kept.
        """
        key = (op, inputs, options.key, destination)
        template = self._by_value.use(key)
        if template is None:
            template = Template(next(self._ids), op, inputs, options, *plan())
            self._by_value.add(key, template)
        return template

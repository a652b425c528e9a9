"""Numbers the templates of this gateway's jobs: equal templates have one number, which an engine is sent once.

Runs in the gateway's event loop.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

from tilewire.service.ipc.messages import InputSpec, OutputSpec, Template
from tilewire.service.ops.registry import Options

# Largest number of templates that a gateway keeps; the one that was used longest ago is forgotten.
MAX_TEMPLATES = 4096


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


class Templates:
    """Caches templates by value; `on_forget` gets the number of each that is dropped."""

    def __init__(self, on_forget: Callable[[int], object], max_templates: int = MAX_TEMPLATES) -> None:
        self._on_forget = on_forget
        self._max_templates = max_templates
        # Never given twice: an engine may still hold a job of an old one.
        self._ids = itertools.count(1)
        self._by_value: OrderedDict[Hashable, Template] = OrderedDict()

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
        template = self._by_value.get(key)
        if template is not None:
            self._by_value.move_to_end(key)
            return template
        outputs = plan()
        if len(self._by_value) >= self._max_templates:
            _, oldest = self._by_value.popitem(last=False)
            self._on_forget(oldest.id)
        template = self._by_value[key] = Template(next(self._ids), op, inputs, options, *outputs)
        return template

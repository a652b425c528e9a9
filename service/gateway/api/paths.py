"""Finds the API and the op of a POST by its path: ops by exact path, kept programs by the form of theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tilewire.service.gateway.request.adapter import Api
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.registry import PROGRAM_FAMILY

# Names are checked when the program is looked up; here, a segment is enough.
_NATIVE = re.compile(r"/v1/(?:run|programs/[^/]+)")
_INFER = re.compile(r"/v2/models/[^/]+(?:/versions/1)?/infer")

Target = tuple[Api, AnyOp]


class OpPaths:
    """Paths of all POSTs that `request.handle` answers.

    Args:
        ops: API and op by exact path.
        native: API of `/v1/programs/{name}` and `/v1/run`.
        infer: API of `/v2/models/{model}/infer`.
    """

    def __init__(self, ops: Mapping[str, Target], native: Api | None = None, infer: Api | None = None) -> None:
        self._ops = ops
        self._native = native
        self._infer = infer

    def get(self, path: str, /) -> Target | None:
        """Returns the API and the op of a path, or None for one that is not of ops."""
        found = self._ops.get(path)
        if found is not None:
            return found
        if self._native is not None and _NATIVE.fullmatch(path):
            return self._native, PROGRAM_FAMILY
        if self._infer is not None and _INFER.fullmatch(path):
            return self._infer, PROGRAM_FAMILY
        return None

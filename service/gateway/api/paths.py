"""Finds the API and the op of a POST by its path: ops by exact path, kept programs by the form of theirs."""

from __future__ import annotations

import re

from tilewire.service.gateway.api.v1.calls import NativeApi
from tilewire.service.gateway.api.v2.answer import VERSION
from tilewire.service.gateway.api.v2.calls import InferApi
from tilewire.service.gateway.request.adapter import Api, FindTarget
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.ops.op import AnyOp
from tilewire.service.ops.registry import OPS, PROGRAM_FAMILY

# Names are checked when the program is looked up.
_RUN = re.compile(r"/v1/(?:run|programs/.*)")
_INFER = re.compile(rf"/v2/models/[^/]+(?:/versions/{VERSION})?/infer")


def target_finder(gateway: Gateway) -> FindTarget:
    """Makes the function that finds the API and the op of a POST of this gateway."""
    native = NativeApi(gateway.settings.max_json_bytes, gateway.programs)
    infer = InferApi(gateway.settings, gateway.programs)
    ops: dict[str, tuple[Api, AnyOp]] = {f"/v1/{name}": (native, op) for name, op in OPS.items()}
    for version in ("", f"/versions/{VERSION}"):
        ops |= {f"/v2/models/{name}{version}/infer": (infer, op) for name, op in OPS.items()}
    programs: tuple[tuple[re.Pattern[str], Api], ...] = ((_RUN, native), (_INFER, infer))

    def find(path: str) -> tuple[Api, AnyOp] | None:
        found = ops.get(path)
        if found is not None:
            return found
        return next(((api, PROGRAM_FAMILY) for form, api in programs if form.fullmatch(path)), None)

    return find

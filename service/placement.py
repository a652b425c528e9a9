"""Decides which engines hold a resident tensor, by its size."""

from __future__ import annotations

from typing import Literal

# Engines that hold a tensor: all, or those that `TensorInfo.engines` names.
Placement = Literal["replicate", "single"]
PLACEMENTS: dict[str, Placement] = {"replicate": "replicate", "single": "single"}
# Of a client that leaves the choice to the service.
AUTO = "auto"

# A tensor of at most this part of a device's quota is on every device: there it takes little room from others.
REPLICATED_PART = 16


def placement_of(nbytes: int, quota_bytes: int) -> Placement:
    """Returns where a tensor lies whose client does not say.

    Args:
        nbytes: Bytes of the tensor.
        quota_bytes: Bytes of residents that a device may hold.
    """
    return "replicate" if nbytes <= quota_bytes // REPLICATED_PART else "single"

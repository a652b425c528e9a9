"""Estimates how long a job takes at best: for the limit on a batch's time, and for what its flow is charged at first."""

from __future__ import annotations

# Operations and bytes per second at which a good device of each kind does large batches. Optimistic on purpose. The
# estimate is of the time that one more job adds to a launch. A job alone mostly takes the time of reading the shared
# operand.
RATES = {"gpu": (6e14, 5e10), "cpu": (2e11, 1e10)}


def predict_s(backend: str, flops: int, host_bytes: int) -> float:
    """Seconds that a job adds to a launch. Resident operands are none of the bytes, which travel between host and device."""
    flops_per_s, bytes_per_s = RATES[backend]
    return flops / flops_per_s + host_bytes / bytes_per_s

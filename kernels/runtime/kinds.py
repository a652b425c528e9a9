"""Numbers of element types, as kernels get them where the binary does not name the type. Pure."""

from __future__ import annotations

# The same numbers as in `kernels.runtime.elements`; 0 for an operand that is absent.
KINDS = {"": 0, "float16": 1, "bfloat16": 2, "float32": 3, "int32": 4}

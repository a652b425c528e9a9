# mypy: ignore-errors
"""Letting a kernel start while the one before it ends. Jit functions only.

On Hopper and later, programs of a marked launch are brought up while the previous kernel of the stream still runs
(programmatic dependent launch). Every kernel here lets its successor do so, most of them first. It waits until its
predecessor has finished and its writes are visible. All reads and writes come after that. Setting up costs about a
microsecond, which is a tenth of a small product.
"""

import triton
import triton.language as tl


@triton.jit
def bring_up_next(OVERLAP: tl.constexpr):
    """Let the next kernel be brought up. Nothing without OVERLAP."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Wait for the previous kernel to end. Nothing without OVERLAP."""
    if OVERLAP:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def await_previous(OVERLAP: tl.constexpr):
    """Let the next kernel be brought up, and wait for the previous one to end. Nothing without OVERLAP."""
    bring_up_next(OVERLAP)
    wait_for_previous(OVERLAP)

# mypy: ignore-errors
"""What is changed in the text of a program (PTX), between the compiler and the assembler.

Whoever has the kernel has this module, so importing it hands `change_stages` to Triton. Other programs pass unchanged.
Triton's cache does not know of it. So the kernel has `CHANGES` as a constant.
"""

import hashlib
from pathlib import Path

from triton import knobs

from tilewire.kernels.matmul.hopper.clusters import join
from tilewire.kernels.matmul.hopper.narrowing import narrow

_HERE = Path(__file__).parent


def digest_of(folder, names):
    """A short digest of these files."""
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in names)).hexdigest()[:8]


# Another one where what is changed may be another: what was compiled before is not taken then.
CHANGES = digest_of(_HERE, ("clusters.py", "narrowing.py", "stages.py"))


def change_stages(_backend=None, stages=None, *_rest):
    """Triton's hook at the stages of a compilation. Without stages, it asks what the hook adds to the keys of its cache."""
    if stages is None:
        return "", ""
    assemble = stages.get("ptx")
    if assemble is not None:
        stages["ptx"] = lambda source, metadata: join(narrow(assemble(source, metadata)))
    return None


knobs.runtime.add_stages_inspection_hook = change_stages

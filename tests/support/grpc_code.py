"""Writes the descriptor that `open_inference_pb2.py` loads, and its types, from `open_inference.proto`.

    python -m tests.support.grpc_code

protoc's own module would put the messages into the pool that all of a process share, where those of other clients of the
protocol have the same names; and it would refuse older versions of protobuf. Ours has a pool of its own.
"""

from __future__ import annotations

import importlib.resources
import tempfile
from pathlib import Path

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

FOLDER = Path(__file__).parents[2] / "service/gateway/grpc"
SOURCE = FOLDER / "open_inference.proto"
DESCRIPTOR, TYPES = FOLDER / "open_inference.binpb", FOLDER / "open_inference_pb2.pyi"


def write(descriptor: Path, types: Path) -> None:
    """Writes both files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        well_known = importlib.resources.files("grpc_tools") / "_proto"
        outs = [f"--pyi_out={folder}", f"--descriptor_set_out={folder / 'descriptors'}"]
        status = protoc.main(["protoc", f"-I{FOLDER}", f"-I{well_known}", *outs, str(SOURCE)])
        assert status == 0, f"protoc ended with {status}"
        (file,) = descriptor_pb2.FileDescriptorSet.FromString((folder / "descriptors").read_bytes()).file
        descriptor.write_bytes(file.SerializeToString(deterministic=True))
        text = (folder / "open_inference_pb2.pyi").read_text(encoding="utf-8")
        pool = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
        types.write_text(f"{pool}{text}\nPOOL: _descriptor_pool.DescriptorPool\n", encoding="utf-8")


if __name__ == "__main__":
    write(DESCRIPTOR, TYPES)

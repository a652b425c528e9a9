"""Writes `open_inference_pb2.py` and its types from `open_inference.proto`.

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
MODULE, TYPES = FOLDER / "open_inference_pb2.py", FOLDER / "open_inference_pb2.pyi"

_LINE_BYTES = 24
_TEMPLATE = '''"""Messages of `open_inference.proto`: change that file and run `python -m tests.support.grpc_code`."""

from google.protobuf import descriptor_pool, message_factory

POOL = descriptor_pool.DescriptorPool()
DESCRIPTOR = POOL.AddSerializedFile(
    bytes.fromhex(
        """
{lines}
        """
    )
)

globals().update(
    {{name: message_factory.GetMessageClass(kind) for name, kind in DESCRIPTOR.message_types_by_name.items()}}
)
'''


def write(module: Path, types: Path) -> None:
    """Writes both files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        well_known = importlib.resources.files("grpc_tools") / "_proto"
        outs = [f"--pyi_out={folder}", f"--descriptor_set_out={folder / 'descriptors'}"]
        status = protoc.main(["protoc", f"-I{FOLDER}", f"-I{well_known}", *outs, str(SOURCE)])
        assert status == 0, f"protoc ended with {status}"
        (file,) = descriptor_pb2.FileDescriptorSet.FromString((folder / "descriptors").read_bytes()).file
        data = file.SerializeToString(deterministic=True)
        lines = [data[at : at + _LINE_BYTES].hex(" ") for at in range(0, len(data), _LINE_BYTES)]
        module.write_text(_TEMPLATE.format(lines="\n".join(" " * 8 + line for line in lines)), encoding="utf-8")
        text = (folder / "open_inference_pb2.pyi").read_text(encoding="utf-8")
        pool = "from google.protobuf import descriptor_pool as _descriptor_pool\n"
        types.write_text(f"{pool}{text}\nPOOL: _descriptor_pool.DescriptorPool\n", encoding="utf-8")


if __name__ == "__main__":
    write(MODULE, TYPES)

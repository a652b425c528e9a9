"""Loads the messages of `open_inference.proto`: change that file and run `python -m tests.support.grpc_code`."""

from importlib import resources

from google.protobuf import descriptor_pool, message_factory

POOL = descriptor_pool.DescriptorPool()
DESCRIPTOR = POOL.AddSerializedFile((resources.files(__package__) / "open_inference.binpb").read_bytes())

globals().update(
    {name: message_factory.GetMessageClass(kind) for name, kind in DESCRIPTOR.message_types_by_name.items()}
)

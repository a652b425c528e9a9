"""The generated descriptor is that of the .proto, and the .proto has the protocol's names and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc.model_config_pb2
import tritonclient.grpc.service_pb2
from google.protobuf.descriptor import Descriptor

from tests.support import grpc_code
from tilewire.service.gateway.grpc.open_inference_pb2 import DESCRIPTOR

THEIRS: dict[str, Any] = {
    **tritonclient.grpc.model_config_pb2.DESCRIPTOR.message_types_by_name,
    **tritonclient.grpc.service_pb2.DESCRIPTOR.message_types_by_name,
}


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    descriptor, types = tmp_path / "descriptor", tmp_path / "types"
    grpc_code.write(descriptor, types)
    assert descriptor.read_bytes() == grpc_code.DESCRIPTOR.read_bytes(), "python -m tests.support.grpc_code"
    assert types.read_text() == grpc_code.TYPES.read_text(), "python -m tests.support.grpc_code"


def same(ours: Descriptor, theirs: Descriptor) -> None:
    for field in ours.fields:
        other = theirs.fields_by_number[field.number]
        assert (field.name, field.type, field.is_repeated) == (other.name, other.type, other.is_repeated)
    for nested in ours.nested_types:
        same(nested, theirs.nested_types_by_name[nested.name])


@pytest.mark.parametrize("name", DESCRIPTOR.message_types_by_name)
def test_fields_are_the_protocols(name: str) -> None:
    ours = DESCRIPTOR.message_types_by_name[name]
    assert ours.full_name == THEIRS[name].full_name
    same(ours, THEIRS[name])


def test_methods_are_the_protocols() -> None:
    (ours,) = DESCRIPTOR.services_by_name.values()
    theirs = tritonclient.grpc.service_pb2.DESCRIPTOR.services_by_name[ours.name]
    assert ours.full_name == theirs.full_name
    for method in ours.methods:
        other = theirs.methods_by_name[method.name]
        for part in ("input_type", "output_type"):
            assert getattr(method, part).full_name == getattr(other, part).full_name
        assert (method.client_streaming, method.server_streaming) == (other.client_streaming, other.server_streaming)


def test_datatypes_are_the_protocols() -> None:
    theirs = tritonclient.grpc.model_config_pb2.DESCRIPTOR.enum_types_by_name["DataType"]
    ours = DESCRIPTOR.enum_types_by_name["DataType"]
    assert {one.name: one.number for one in ours.values} == {one.name: one.number for one in theirs.values}

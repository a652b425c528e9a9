"""Messages and their frames: what is sent arrives, however the stream is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewire.service.errors import BY_CODE, InternalError
from tilewire.service.ipc.messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    AdoptTensor,
    AwaitCopy,
    Cancel,
    DeleteTensor,
    DescribeTensor,
    Done,
    Failed,
    FetchTensor,
    ForgetTemplate,
    FrameDecoder,
    GetTensor,
    Hello,
    InputSpec,
    Job,
    ListRegions,
    ListTensors,
    OrderTensor,
    OutputSpec,
    PutTensor,
    Refused,
    RegionInfo,
    RegionList,
    RegisterRegion,
    Residing,
    Stale,
    Stored,
    Template,
    TensorInfo,
    Tensors,
    Timings,
    ToEngine,
    ToGateway,
    UnregisterRegion,
    Upload,
    Welcome,
    encode_frame,
)
from tilewire.service.ops.add import AddOptions
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.softmax import SoftmaxOptions

KIND = TensorType("float32", (2, 3))
REGION = RegionInfo("r", "/key", 2**62, 2**62, 2**62, 2**63)
TO_ENGINE = [
    Hello(0, 2**40),
    Template(
        1,
        "matmul",
        (InputSpec("a", KIND), InputSpec("b", KIND, resident="w")),
        MatmulOptions(transpose_a=True),
        (OutputSpec(KIND),),
        1,
        2,
    ),
    Job(1, 1, (0, 256)),
    Template(
        2**40,
        "softmax",
        (InputSpec("x", KIND, fortran=True),),
        SoftmaxOptions(axis=-3, log=True),
        (OutputSpec(KIND, "s"), OutputSpec(TensorType("int64", ()))),
        2**62,
        2**62,
    ),
    Job(2, 2**40, (2**50, 0, 2**62), 5, 3, "request"),
    Template(3, "add", (), AddOptions(alpha=0.5, out_dtype="float64"), (), 0, 0),
    ForgetTemplate(3),
    Cancel(4),
    PutTensor(5, "a/b", Upload(KIND, 7, fortran=True)),
    GetTensor(6, "a", KIND, 8),
    DescribeTensor(7, "a"),
    DeleteTensor(8, "a"),
    PutTensor(5, "a/b", Upload(KIND, 7), "single"),
    OrderTensor(8, TensorInfo("a", KIND, 1.5, placement="single", engines=(1, 2)), 2**62),
    AdoptTensor(8, 2**40, TensorInfo("a", KIND, 1.5, version=2**62)),
    AwaitCopy(8, 2**62),
    FetchTensor(8, "a"),
    Template(10, "add", (InputSpec("a", KIND),), AddOptions(), (OutputSpec(KIND, resident="y"),), 1, 1),
    ListTensors(9),
    Template(10, "add", (InputSpec("a", KIND, region="r"),), AddOptions(), (OutputSpec(KIND),), 1, 1),
    RegisterRegion(11, REGION),
    UnregisterRegion(12, None),
    UnregisterRegion(13, "r", 2**62),
    ListRegions(14, "r"),
]
INFO = TensorInfo("a", KIND, 1.5, None, 3)
TO_GATEWAY = [
    Welcome(0, "cpu", "cpu", "name", "2", "none", 2**40),
    Done(1, Timings(1, 2, 3, 4), 5),
    Done(1, Timings(), 1, Stored(INFO, 2**40)),
    Residing((2**62, 0)),
    Refused("no memory"),
    Failed(2, "too_busy", "full", 7),
    Stale(3, (INFO,)),
    Tensors(4, (INFO, INFO), replaced=True),
    Tensors(4, (INFO,), ticket=7),
    RegionList(5, (REGION, REGION), 9),
]


@pytest.mark.parametrize(("kind", "messages"), [(ToEngine, TO_ENGINE), (ToGateway, TO_GATEWAY)])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_frames_cut_anywhere_give_the_same_messages(kind: object, messages: list, data: st.DataObject) -> None:
    stream = encode_frame(messages[:3]) + encode_frame([]) + b"".join(encode_frame([one]) for one in messages[3:])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder: FrameDecoder = FrameDecoder(kind)
    seen = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        seen += decoder.feed(stream[start:end])
    assert seen == messages


def test_one_byte_at_a_time() -> None:
    decoder: FrameDecoder = FrameDecoder(ToGateway)
    assert [one for byte in encode_frame(TO_GATEWAY) for one in decoder.feed(bytes([byte]))] == TO_GATEWAY


def test_a_frame_that_is_too_long_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        FrameDecoder(ToEngine).feed((MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "little"))


@pytest.mark.parametrize("messages", [TO_GATEWAY[:1], [Cancel(1), TO_GATEWAY[1]]])
def test_messages_of_the_other_direction_are_refused(messages: list) -> None:
    with pytest.raises(ValueError, match="Invalid value"):
        FrameDecoder(ToEngine).feed(encode_frame(messages))


def test_bytes_that_are_no_messages_are_refused() -> None:
    with pytest.raises(ValueError, match=r"malformed|truncated|Expected|trailing"):
        FrameDecoder(ToEngine).feed((4).to_bytes(4, "little") + b"\xc1\xc1\xc1\xc1")


@pytest.mark.parametrize("code", BY_CODE)
def test_failures_become_the_errors_that_they_were(code: str) -> None:
    error = Failed(1, code, "why", 9).error()
    assert type(error) is BY_CODE[code]
    assert (error.detail, error.retry_after_s) == ("why", 9)


def test_a_failure_of_no_known_class_is_a_bug() -> None:
    assert type(Failed(1, "nonsense", "why").error()) is InternalError

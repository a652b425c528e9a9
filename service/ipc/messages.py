"""Defines the messages that cross the Unix socket between a gateway and an engine, and their frames.

A frame is a 4-byte little-endian length and a MessagePack list of messages, so that many small messages share one write.
Tensors never cross: only where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

import msgspec

from tilewire.service.errors import BY_CODE, InternalError, TilewireError
from tilewire.service.match import Match
from tilewire.service.ops.op import TensorType
from tilewire.service.ops.registry import Options
from tilewire.service.placement import Part, Placement

MAX_FRAME_BYTES = 64 * 2**20
LENGTH_BYTES = 4

# A host copy, and the file of it in the store, are made within this, or the request is 503.
WRITE_TIMEOUT_S = 120.0

MessageT = TypeVar("MessageT")


class Upload(msgspec.Struct, frozen=True, array_like=True):
    """A tensor in the gateway's segment.

    Attributes:
        offset: Offset of its first byte in the segment.
    """

    type: TensorType
    offset: int
    fortran: bool = False


class InputSpec(msgspec.Struct, frozen=True, array_like=True):
    """One input of a template: bytes in the gateway's segment, bytes in a client's region, or a resident tensor.

    Attributes:
        resident: Name of a resident tensor, or None.
        region: Name of a registered region, or None.
        version: Version that the resident must have, as clients see it; None for any.
        part: Part of the resident that is the input; None for all of it.
    """

    name: str
    type: TensorType
    resident: str | None = None
    region: str | None = None
    fortran: bool = False
    version: int | None = None
    part: Part | None = None

    def fits(self, info: TensorInfo) -> bool:
        """Whether a resident is as the template was planned with it."""
        return info.type == self.type and self.version in (None, info.tag)


class OutputSpec(msgspec.Struct, frozen=True, array_like=True):
    """One result of a template.

    Attributes:
        region: Name of the registered region that takes it, or None for the gateway's segment.
        resident: Name under which it stays on the device, or None. It then has no offset.
        durable: It becomes resident once a host copy exists.
        pitch: Bytes from row to row of a result that other engines complete; 0 where rows follow one another.
    """

    type: TensorType
    region: str | None = None
    resident: str | None = None
    durable: bool = False
    pitch: int = 0


class TensorInfo(msgspec.Struct, frozen=True):
    """Description of a resident tensor.

    Attributes:
        name: Name without the `@`.
        created: Unix time in seconds of its upload, or of the last change of its file.
        last_used: Unix time in seconds of the last request that read it, or None.
        version: Position of its last change in the home engine's order; 0 for a tensor that was loaded from a file.
        placement: Engines that shall hold it.
        engines: Engines that hold it, or a part of it, for certain; empty for all.
        stored: Version of its file in the folder of `--store`; 0 for a tensor without one.
        base: Last version of the name in that folder when a tensor without a file was ordered; 0 for none.
        axis: Axis along which a sharded tensor is cut, from the last, -1; 0 for a tensor in one piece.
        num_parts: Number of engines that shall have a part each; 0 for a tensor in one piece.
    """

    name: str
    type: TensorType
    created: float
    last_used: float | None = None
    hits: int = 0
    version: int = 0
    placement: Placement = "replicate"
    engines: tuple[int, ...] = ()
    stored: int = 0
    base: int = 0
    axis: int = 0
    num_parts: int = 0

    @property
    def tag(self) -> int:
        """Version that clients see: that of its file in the folder of `--store`, or that of its home engine.

        One of another file has the time of the file's last change, in microseconds as in that folder.
        """
        return self.stored or self.version or int(self.created * 1e6)


class RegionInfo(msgspec.Struct, frozen=True):
    """A client's shared memory that is registered.

    Attributes:
        name: As requests call it.
        key: Name of the shared-memory object, as the client gave it.
        offset: Offset of the region in the object.
        byte_size: Length of the region.
        stamp: Given by the first engine, larger for each later registration or unregistration.
        inode: Inode of the object; every engine must have opened the same one.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    stamp: int = 0
    inode: int = 0


class Timings(msgspec.Struct, frozen=True, array_like=True):
    """Stage times of a job in nanoseconds, and its arrival on the machine's monotonic clock."""

    queue_ns: int = 0
    h2d_ns: int = 0
    kernel_ns: int = 0
    d2h_ns: int = 0
    arrived_ns: int = 0

    @property
    def stages(self) -> tuple[tuple[str, int], ...]:
        """Name and nanoseconds of each stage, in their order."""
        return ("queue", self.queue_ns), ("h2d", self.h2d_ns), ("kernel", self.kernel_ns), ("d2h", self.d2h_ns)


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message of a gateway; its segment's descriptor travels beside it."""

    gateway: int
    segment_bytes: int


class Template(msgspec.Struct, frozen=True, array_like=True, tag="template"):
    """All that jobs have in common which differ only in where their bytes lie. Sent before the first job that names it.

    Attributes:
        id: Number that the gateway gives only once.
        inputs: Inputs, in the order of a job's offsets.
        outputs: Results, in the order of `Op.outputs`.
        flops: Operations of one job.
        moved_bytes: Bytes that one job reads and writes.
    """

    id: int
    op: str
    inputs: tuple[InputSpec, ...]
    options: Options
    outputs: tuple[OutputSpec, ...]
    flops: int
    moved_bytes: int


class Job(msgspec.Struct, frozen=True, array_like=True, tag="job"):
    """One request to compute.

    Attributes:
        id: Number, unique among the gateway's requests.
        offsets: Offsets of the first bytes in the gateway's segment or in the region. In order, one for each input that
            is no resident, then one for each output that leaves the device.
        deadline_ns: Latest start on the machine's monotonic clock; 0 for none.
        priority: Order within the flow: 0 is the default, 1 the most urgent, larger ones less so.
        request_id: Name of the request in logs.
        flow: Number of the sender with whom its other jobs share: an API key, or a client's address.
        weight: Share of the flow beside those of others.
    """

    id: int
    template: int
    offsets: tuple[int, ...]
    deadline_ns: int = 0
    priority: int = 0
    request_id: str = ""
    flow: int = 0
    weight: int = 1


class ForgetTemplate(msgspec.Struct, frozen=True, array_like=True, tag="forget"):
    """Forgets the template `id`; jobs of it that were sent before still run."""

    id: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Job `id` need not run: its client left, or its deadline passed.

    `Failed` follows for one that had not started. For another `Started` does, and its result, with which the slots are free.

    Attributes:
        is_late: Its deadline passed. Timers are not exact: on the engine's clock that may be still to come.
    """

    id: int
    is_late: bool = False


class _Numbered(msgspec.Struct, frozen=True, array_like=True):
    id: int


class _Request(_Numbered, frozen=True, array_like=True, kw_only=True):
    """Message that is answered and is no job.

    Attributes:
        request_id: Name of the request in logs; behind the fields of each class.
    """

    request_id: str = ""


class PutTensor(_Request, frozen=True, array_like=True, tag="put"):
    """Make the bytes of `source` resident under `name`. The home engine orders the change; another one only holds the bytes.

    Attributes:
        placement: Engines that shall hold it.
        axis: As in `TensorInfo`.
        match: Condition on the tensor that it replaces, for the home engine, or for the store.
    """

    name: str
    source: Upload
    placement: Placement = "replicate"
    axis: int = 0
    match: Match | None = None


class OrderTensor(_Request, frozen=True, array_like=True, tag="order"):
    """Give the tensor of a ticket a version. For the home engine of its name, which may have given the ticket itself.

    Attributes:
        info: Description; `engines` names the engine that holds it.
        ticket: Number from `Stored` or `Tensors`.
        match: Condition on the tensor that it replaces.
    """

    info: TensorInfo
    ticket: int
    match: Match | None = None


class AdoptTensor(_Request, frozen=True, array_like=True, tag="adopt"):
    """Make the tensor of a ticket resident; its home engine has given it a version.

    Attributes:
        ticket: Number from `Stored`.
        info: Description with its version; drop the tensor when there is none.
        is_unsure: The home engine may have given it a version, or may yet.
    """

    ticket: int
    info: TensorInfo
    is_unsure: bool = False


class AwaitCopy(_Request, frozen=True, array_like=True, tag="copy"):
    """Answer when the tensor of a ticket has a host copy, and its file where there is a store.

    Attributes:
        ticket: Number from `Stored`.
    """

    ticket: int


class GetTensor(_Request, frozen=True, array_like=True, tag="get"):
    """Write the resident `name`, whose whole type is `expected`, to `out_offset` of the segment.

    Attributes:
        version: Version that it must have; 0 for any. A part of a sharded tensor is written only with a version.
    """

    name: str
    expected: TensorType
    out_offset: int
    version: int = 0


class DescribeTensor(_Request, frozen=True, array_like=True, tag="describe"):
    """Requests the description of `name`; answered when the engine has a change, and the tensor if it shall hold it.

    Attributes:
        version: Version of that change; 0 for any.
        match: Condition on the version; where it does not hold, the store is looked at first.
    """

    name: str
    version: int = 0
    match: Match | None = None


class FetchTensor(_Request, frozen=True, array_like=True, tag="fetch"):
    """Bring a tensor that another engine holds onto this device, too, and answer with its description.

    Attributes:
        version: Version of the change that the engine must have before it answers; 0 for any.
    """

    name: str
    version: int = 0


class DeleteTensor(_Request, frozen=True, array_like=True, tag="delete"):
    """Forget `name`; requests under way finish with it. For the home engine; the others follow it through the vault."""

    name: str
    match: Match | None = None


class ListTensors(_Request, frozen=True, array_like=True, tag="list"):
    """Describe residents: a part of them at a time, since the others' requests wait meanwhile.

    Attributes:
        prefix: What their names begin with.
        after: Number of the part before, from its `Tensors`; 0 for the first.
    """

    prefix: str = ""
    after: int = 0


class RegisterRegion(_Request, frozen=True, array_like=True, tag="register"):
    """Make a client's shared memory usable under a name.

    Attributes:
        region: Region to register; its stamp is 0 when the engine shall give one.
    """

    region: RegionInfo


class UnregisterRegion(_Request, frozen=True, array_like=True, tag="unregister"):
    """Forget a region, or all; jobs under way finish with it. Unknown names are no error.

    Attributes:
        name: Name of the region; None for all.
        stamp: Only registrations up to this one; 0 for whatever there is now.
    """

    name: str | None
    stamp: int = 0


class DescribeKernels(_Request, frozen=True, array_like=True, tag="kernels"):
    """Requests the description of the engine's kernels."""


class ListRegions(_Request, frozen=True, array_like=True, tag="regions"):
    """The region `name`, or all."""

    name: str | None = None


# Messages that have an answer and are no jobs.
Command = (
    PutTensor
    | GetTensor
    | DescribeTensor
    | DeleteTensor
    | OrderTensor
    | AdoptTensor
    | AwaitCopy
    | FetchTensor
    | ListTensors
    | RegisterRegion
    | UnregisterRegion
    | ListRegions
    | DescribeKernels
)
ToEngine = Hello | Template | ForgetTemplate | Job | Cancel | Command


class Residing(msgspec.Struct, frozen=True, array_like=True, tag="residing"):
    """The engine has followed each home engine up to a version. Sent when that changes.

    Attributes:
        versions: Version of the last change, by the index of its home engine.
    """

    versions: tuple[int, ...]


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The engine is ready and has mapped the segment.

    Attributes:
        backend: `cpu` or `gpu`.
        device: `cpu`, `cuda:0`, …
        device_name: As its maker calls it.
        triton: Version of Triton, or "none".
        resident_bytes: Quota of resident tensors on the device.
        residing: How far the engine has followed the others.
        has_store: Whether tensors are kept in the folder of `--store`.
        pid: Number of its process, by which its end is seen; 0 for none.
    """

    engine: int
    backend: str
    device: str
    device_name: str
    torch: str
    triton: str
    resident_bytes: int = 0
    residing: Residing = Residing(())
    has_store: bool = False
    pid: int = 0


class Warming(msgspec.Struct, frozen=True, array_like=True, tag="warming"):
    """The engine is not ready yet; this is how far it is.

    Attributes:
        device: Device of the engine.
        stage: `residents`, `compile`, `load`, `tune`, `run` or `check`.
        done: Steps of the stage that are done, of `total`.
        total: Number of steps; 0 when unknown.
    """

    device: str
    stage: str
    done: int
    total: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The engine cannot map the gateway's segment, and closes the connection.

    Attributes:
        reason: What the system says.
    """

    reason: str


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A result that stays on the device.

    Attributes:
        info: Description; without a version until the home engine has given it one.
        ticket: Number for `OrderTensor` and `AdoptTensor`; 0 when the tensor is resident.
        replaced: Whether it replaced another.
    """

    info: TensorInfo
    ticket: int = 0
    replaced: bool = False


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Job `id`: its result is in its slot, or stays on the device. `stored` describes it, or the tensor that was read."""

    id: int
    timings: Timings
    batch_size: int = 1
    stored: Stored | None = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Request `id` failed with a class of the error tree."""

    id: int
    code: str
    detail: str
    retry_after_s: int = 1

    @classmethod
    def of(cls, id_: int, error: TilewireError) -> Failed:
        """Returns the answer to a request that an error has ended."""
        return cls(id_, error.code, error.detail, error.retry_after_s)

    def error(self) -> TilewireError:
        """The error to raise in the gateway."""
        return BY_CODE.get(self.code, InternalError)(self.detail, retry_after_s=self.retry_after_s)


class Started(msgspec.Struct, frozen=True, array_like=True, tag="started"):
    """Job `id` has started and is not cancelled: its result follows, or came before this."""

    id: int


class Stale(msgspec.Struct, frozen=True, array_like=True, tag="stale"):
    """Job `id` was planned with a resident whose type has changed; nothing was computed. Plan again with these.

    Attributes:
        tensors: Residents as they are now.
        missing: Names that this host may have to load from the store first.
    """

    id: int
    tensors: tuple[TensorInfo, ...]
    missing: tuple[str, ...] = ()


class Tensors(msgspec.Struct, frozen=True, array_like=True, tag="tensors"):
    """Answer to messages about residents.

    Attributes:
        replaced: Whether a put or an order found an older tensor.
        ticket: Number for `AdoptTensor`, from a put to an engine that is not the home; else 0.
        next: Number of this part of a list, where more may follow; else 0.
    """

    id: int
    tensors: tuple[TensorInfo, ...]
    replaced: bool = False
    ticket: int = 0
    next: int = 0


class RegionList(msgspec.Struct, frozen=True, array_like=True, tag="registered"):
    """Answer to the messages about regions. `stamp` is that of the change, 0 for none."""

    id: int
    regions: tuple[RegionInfo, ...]
    stamp: int = 0


class Kernels(msgspec.Struct, frozen=True, array_like=True, tag="kernels"):
    """Answer to `DescribeKernels`: the engine's part of `/v1/kernels`, as JSON."""

    id: int
    report: bytes


ToGateway = Welcome | Residing | Warming | Refused | Done | Failed | Started | Stale | Tensors | RegionList | Kernels

_encoder = msgspec.msgpack.Encoder()


def encode_message(message: msgspec.Struct) -> msgspec.Raw:
    """Packs a message for a frame, so that one which cannot be encoded fails alone."""
    return msgspec.Raw(_encoder.encode(message))


def encode_frame(messages: Iterable[msgspec.Struct | msgspec.Raw]) -> bytes:
    """Packs messages into one frame."""
    body = _encoder.encode(list(messages))
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


class FrameDecoder(Generic[MessageT]):
    """Cuts a byte stream into frames and frames into messages.

    Args:
        kind: The union that the peer may send.

    Raises:
        ValueError: From `feed`, on a frame that is too long or not of `kind`. The peer is broken: close the connection.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[MessageT]] = msgspec.msgpack.Decoder(list[kind])
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Adds received bytes; returns the messages that are complete now."""
        self._buffer += data
        messages: list[MessageT] = []
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES:
            length = int.from_bytes(self._buffer[start : start + LENGTH_BYTES], "little")
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {length} bytes; the limit is {MAX_FRAME_BYTES}")
            end = start + LENGTH_BYTES + length
            if len(self._buffer) < end:
                break
            with memoryview(self._buffer)[start + LENGTH_BYTES : end] as body:
                messages += self._decoder.decode(body)
            start = end
        del self._buffer[:start]
        return messages

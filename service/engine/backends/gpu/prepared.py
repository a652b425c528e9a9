"""Batches of equal small requests that are like ones before: their memory is kept, and their launches are prepared.

Small requests, alone or together, cost the host more than the device: copies to be described, kernels to be chosen, arguments
to be laid out. Whatever depends only on types is done once. What is left is three launches on one stream, and the addresses
of the slots. Knows no scheduler and no event. Runs in the engine's loop thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tilewire import kernels
from tilewire.kernels.copy.op import PreparedCopy, Stretch
from tilewire.service.engine.backends.contract import HostBytes, Joined
from tilewire.service.engine.backends.gpu.host import TORCH_DTYPES
from tilewire.service.engine.backends.gpu.staging import Staging, can_pad, stretches_of
from tilewire.service.ops.registry import AddOptions, MatmulOptions, Options

# Larger requests gain nothing: copying them takes longer than what is saved.
MOST_BYTES = 2**19
# Batches of one kind that can be under way at once, each with memory of its own.
MOST_OF_A_KIND = 2
# Memory of all kinds together, and kinds of which it may only be known that they came once.
MOST_KEPT_BYTES = 2**28
MOST_KINDS = 1024
# Copies go by words of up to this.
WORD_BYTES = 8

Compute = Callable[[Mapping[str, torch.Tensor]], None]


class PreparedBatch:
    """Room for up to so many equal requests, and what computes any number of them.

    Args:
        joined: The first batch of its kind.
        capacity: Requests; 1 for a kind that runs alone.
        staging: Where memory comes from.
        stream: Where it runs; it is the current one.
        is_invariant: As `GpuBackend`'s.

    Attributes:
        is_busy: A batch is on the device, and this memory with it.
        nbytes: Of memory on the device.
        capacity: See above.
        stream: See above.

    Raises:
        ValueError: It takes several launches.
    """

    def __init__(
        self, joined: Joined, capacity: int, staging: Staging, stream: torch.cuda.Stream | None, *, is_invariant: bool
    ) -> None:
        self.is_busy = False
        self.capacity = capacity
        self.stream = stream
        self._options = joined.options
        self._is_invariant = is_invariant
        count, pads = len(joined.outs), can_pad(joined)
        shapes = {name: shape for name, (_, shape) in joined.gathered.items()}
        types = {name: sources[0].type for name, (sources, _) in joined.gathered.items()}
        self._own = {
            name: staging.empty(_grown(shape, count, capacity), TORCH_DTYPES[types[name].dtype], can_pad=pads)
            for name, shape in shapes.items()
        }
        out = joined.outs[0]
        self._out = staging.empty(_grown(joined.out_shape, count, capacity), TORCH_DTYPES[out.type.dtype], can_pad=pads)
        # Rows of one request, by input; the result's under its own name.
        self._units = {name: shape[0] // count if shape else 1 for name, shape in shapes.items()}
        self._out_unit = joined.out_shape[0] // count if joined.out_shape else 1
        self.nbytes = sum(tensor.numel() * tensor.itemsize for tensor in (*self._own.values(), self._out))
        copies = [_copies(whole, HostBytes(whole, types[name], 0), capacity) for name, whole in self._own.items()]
        # Operand by operand for each request, so that those of the first few are the first few of the table.
        ordered = [one for of_request in zip(*copies, strict=True) for one in of_request]
        self._copy_in = PreparedCopy([one._replace(source=0) for one in ordered], staging.device, is_gather=True)
        back = [_turned(one) for one in _copies(self._out, HostBytes(self._out, out.type, 0), capacity)]
        self._copy_out = PreparedCopy(back, staging.device, is_gather=False)
        self._computes: dict[int, Compute] = {}
        # Residents may be replaced while this is kept, and must not live on for it.
        self._shared = {name: weakref.ref(tensor) for name, tensor in joined.shared.items()}
        self._compute_for(count, joined.shared)

    def has(self, shared: Mapping[str, torch.Tensor]) -> bool:
        """Whether it was prepared for these residents."""
        return all(self._shared[name]() is tensor for name, tensor in shared.items())

    def reaches(self, batch: Addresses) -> bool:
        """Whether its copies can move from and to these addresses."""
        return not (batch.in_bits % self._copy_in.word or batch.out_bits % self._copy_out.word)

    def copy_in(self, batch: Addresses) -> None:
        """Brings the operands onto the device, on the current stream."""
        self._copy_in(batch.sources)

    def compute(self, count: int, shared: Mapping[str, torch.Tensor]) -> None:
        """Launches the op on the current stream, for so many requests."""
        self._compute_for(count, shared)({**self._own, **shared})

    def copy_out(self, batch: Addresses) -> None:
        """Brings the results into their slots, on the current stream."""
        self._copy_out(batch.outs)

    def _compute_for(self, count: int, shared: Mapping[str, torch.Tensor]) -> Compute:
        found = self._computes.get(count)
        if found is None:
            if self.capacity == 1:
                inputs, out = {**self._own, **shared}, self._out
            else:
                own = {name: whole[: count * self._units[name]] for name, whole in self._own.items()}
                inputs, out = {**own, **shared}, self._out[: count * self._out_unit]
            found = self._computes[count] = _prepare(self._options, inputs, out, is_invariant=self._is_invariant)
        return found


@dataclass(eq=False, slots=True)
class Addresses:
    """Where the operands and results of a batch lie on the host.

    Attributes:
        sources: Of each request's operands, in order.
        outs: Of each request's result.
        in_bits: All of the former or'ed.
        out_bits: All of the latter or'ed.
    """

    sources: list[int]
    outs: list[int]
    in_bits: int
    out_bits: int


class PreparedBatches:
    """Those that are kept.

    Args:
        staging: Where memory comes from.
        streams: On which they run, in turn.
        is_invariant: As `GpuBackend`'s.
    """

    def __init__(self, staging: Staging, streams: Sequence[torch.cuda.Stream | None], *, is_invariant: bool) -> None:
        self._staging = staging
        self._streams = streams
        self._is_invariant = is_invariant
        self._num_made = 0
        self._nbytes = 0
        # An empty list for a kind that came once, None for one that cannot be prepared.
        self._kept: dict[Hashable, list[PreparedBatch] | None] = {}

    def find(self, launches: Sequence[Joined]) -> tuple[PreparedBatch, Addresses] | None:
        """What runs a batch, and where its requests lie; None where it must go the general way.

        The first of its kind goes that way too: most kinds that come once never come again.
        """
        if len(launches) != 1:
            return None
        joined = launches[0]
        key = _key_of(joined)
        if key is None or not self._reaches(joined):
            return None
        kept = self._kept.get(key, ())
        if kept is None:
            return None
        if kept == ():
            if len(self._kept) >= MOST_KINDS:
                self._forget()
            self._kept[key] = []
            return None
        assert isinstance(kept, list), "This is a bug."
        addresses = _addresses(joined)
        found = self._free(kept, joined) or self._made(key, kept, joined)
        return (found, addresses) if found is not None and found.reaches(addresses) else None

    def _reaches(self, joined: Joined) -> bool:
        places = (joined.outs, *(sources for sources, _ in joined.gathered.values()))
        return all(self._staging.can_address(some) for some in places)

    def _free(self, kept: list[PreparedBatch], joined: Joined) -> PreparedBatch | None:
        count = len(joined.outs)
        for one in kept:
            if not one.is_busy and one.capacity >= count and one.has(joined.shared):
                return one
        return None

    def _made(self, key: Hashable, kept: list[PreparedBatch], joined: Joined) -> PreparedBatch | None:
        """One more of a kind, in place of one that is too small or whose residents are gone."""
        count = len(joined.outs)
        useless = [one for one in kept if one.capacity < count or not one.has(joined.shared)]
        for one in useless:
            kept.remove(one)
            self._nbytes -= one.nbytes
        if len(kept) >= MOST_OF_A_KIND:
            return None
        if self._nbytes > MOST_KEPT_BYTES:
            self._forget()
            kept = self._kept[key] = []
        stream = self._streams[self._num_made % len(self._streams)]
        self._num_made += 1
        capacity = 1 if count == 1 else 1 << (count - 1).bit_length()
        try:
            if stream is not None:
                torch.cuda.set_stream(stream)
            made = PreparedBatch(joined, capacity, self._staging, stream, is_invariant=self._is_invariant)
        except ValueError:
            self._kept[key] = None
            return None
        self._nbytes += made.nbytes
        kept.append(made)
        return made

    def _forget(self) -> None:
        """Starts over; what is under way is held by whoever began it."""
        self._kept.clear()
        self._nbytes = 0


def _key_of(joined: Joined) -> Hashable | None:
    """What batches of one kind have in common; None for one that is not of equal requests, or not worth it."""
    outs = joined.outs
    count, kind = len(outs), outs[0].type
    if not _are_all(outs, kind):
        return None
    host_bytes = kind.nbytes
    is_empty = not host_bytes
    own = []
    for name, (sources, _) in joined.gathered.items():
        first = sources[0]
        if len(sources) != count or first.fortran or not _are_all(sources, first.type):
            return None
        nbytes = first.type.nbytes
        host_bytes += nbytes
        is_empty |= not nbytes
        own.append((name, first.type))
    if not own or is_empty or host_bytes > MOST_BYTES:
        return None
    shared = tuple((name, id(tensor)) for name, tensor in joined.shared.items())
    # What runs alone may have its rows anywhere; of a batch they are the first dimension.
    return (joined.options, count > 1, len(joined.out_shape), tuple(own), shared, kind)


def _are_all(places: Sequence[HostBytes], kind: object) -> bool:
    return all(place.type is kind or place.type == kind for place in places)


def _addresses(joined: Joined) -> Addresses:
    columns = [[_address(source) for source in sources] for sources, _ in joined.gathered.values()]
    sources = (
        columns[0] if len(columns) == 1 else [one for of_request in zip(*columns, strict=True) for one in of_request]
    )
    outs = [_address(place) for place in joined.outs]
    in_bits = out_bits = 0
    for address in sources:
        in_bits |= address
    for address in outs:
        out_bits |= address
    return Addresses(sources, outs, in_bits % WORD_BYTES, out_bits % WORD_BYTES)


def _address(place: HostBytes) -> int:
    return place.mapped.data_ptr() + place.offset


def _grown(shape: tuple[int, ...], count: int, capacity: int) -> tuple[int, ...]:
    """The shape of `capacity` requests' whole, from that of `count`."""
    return shape if capacity == 1 else (shape[0] // count * capacity, *shape[1:])


def _copies(whole: torch.Tensor, piece: HostBytes, capacity: int) -> Iterator[Stretch]:
    """What brings each request's piece into the whole; the addresses on the host are 0."""
    pieces = [HostBytes(piece.mapped, piece.type, -piece.mapped.data_ptr()) for _ in range(capacity)]
    yield from stretches_of(whole, pieces, is_padded=not whole.is_contiguous(), is_gather=True)


def _turned(one: Stretch) -> Stretch:
    """The copy back."""
    return Stretch(one.destination, one.source, one.nbytes, one.row_bytes, one.pitch_to, one.pitch_from)


def _prepare(options: Options, inputs: Mapping[str, torch.Tensor], out: torch.Tensor, *, is_invariant: bool) -> Compute:
    """The op with all but its residents' addresses bound.

    Raises:
        ValueError: It takes several launches.
    """
    if isinstance(options, MatmulOptions):
        return _prepare_matmul(options, inputs, out, is_invariant=is_invariant)
    if isinstance(options, AddOptions):
        add = kernels.prepare_add(inputs["a"], inputs["b"], out, alpha=options.alpha)
        return lambda given: add(given["a"], given["b"], out)
    softmax = kernels.prepare_softmax(
        inputs["x"], out, axis=options.axis, log=options.log, batch_invariant=is_invariant
    )
    return lambda given: softmax(given["x"], out)


def _prepare_matmul(
    options: MatmulOptions, inputs: Mapping[str, torch.Tensor], out: torch.Tensor, *, is_invariant: bool
) -> Compute:
    matmul = kernels.prepare_matmul(
        inputs["a"].mT if options.transpose_a else inputs["a"],
        inputs["b"].mT if options.transpose_b else inputs["b"],
        out,
        bias=inputs.get("bias"),
        a_scale=inputs.get("a_scale"),
        b_scale=inputs.get("b_scale"),
        activation=options.activation,
        precision=options.precision,
        batch_invariant=is_invariant,
    )
    # A launch takes addresses, which a transposed view shares with what it shows.
    return lambda given: matmul(
        given["a"], given["b"], out, given.get("bias"), given.get("a_scale"), given.get("b_scale")
    )

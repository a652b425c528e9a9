"""Requests that run alone and are like ones before: their memory on the device is kept, and their launches are prepared.

A lone request is small, so what it costs is the host's time between its launches. Whatever depends only on its types is done
once: memory, the choice of a kernel, its arguments, the table of the copies. What is left is three launches on one stream.
Knows no scheduler and no event. Runs in the engine's loop thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence

import torch

import kernels
from kernels.staging.op import PreparedCopy
from service.engine.backends.contract import HostBytes, Joined
from service.engine.backends.host import TORCH_DTYPES
from service.engine.backends.staging import Staging, can_pad, stretches_of
from service.ops import AddOptions, MatmulOptions, Options

# Larger ones gain nothing: copying them takes longer than what is saved.
MOST_BYTES = 2**19
# Kinds that are kept, and kinds of which it is known that they came once.
MOST_KEPT = 256

Compute = Callable[[Mapping[str, torch.Tensor]], None]


class Solo:
    """One kind of request: all of one have the same types, options and residents.

    Args:
        joined: The first of them.
        staging: Where memory comes from.
        device: The GPU.
        is_invariant: As `GpuBackend`'s.

    Attributes:
        is_busy: One of them is on the device, and this memory with it.

    Raises:
        ValueError: It takes several launches, or has no elements.
    """

    def __init__(self, joined: Joined, staging: Staging, device: torch.device, *, is_invariant: bool) -> None:
        self.is_busy = False
        pads = can_pad(joined)
        dtype = TORCH_DTYPES[joined.outs[0].type.dtype]
        self._out = staging.empty(joined.out_shape, dtype, can_pad=pads)
        self._own: dict[str, torch.Tensor] = {}
        copies = []
        for name, ((source,), shape) in joined.gathered.items():
            whole = staging.empty(shape, TORCH_DTYPES[source.type.dtype], can_pad=pads)
            copies += stretches_of(whole, (source,), is_padded=not whole.is_contiguous(), is_gather=True)
            self._own[name] = whole
        self._copy_in = PreparedCopy([one._replace(source=0) for one in copies], device, is_gather=True)
        (back,) = stretches_of(self._out, joined.outs, is_padded=not self._out.is_contiguous(), is_gather=False)
        self._copy_out = PreparedCopy([back._replace(destination=0)], device, is_gather=False)
        # Residents may be replaced while this is kept, and must not live on for it.
        self._shared = {name: weakref.ref(tensor) for name, tensor in joined.shared.items()}
        self._compute = _prepare(joined.options, self._own | dict(joined.shared), self._out, is_invariant=is_invariant)

    def fits(self, joined: Joined) -> bool:
        """Whether a request of this kind can run here now."""
        if self.is_busy or any(self._shared[name]() is not tensor for name, tensor in joined.shared.items()):
            return False
        places = [_address(source) for (source,), _ in joined.gathered.values()]
        is_in_aligned = all(place % self._copy_in.word == 0 for place in places)
        return is_in_aligned and _address(joined.outs[0]) % self._copy_out.word == 0

    def copy_in(self, joined: Joined) -> None:
        """Brings the operands onto the device, on the current stream."""
        self._copy_in([_address(source) for (source,), _ in joined.gathered.values()])

    def compute(self, joined: Joined) -> None:
        """Launches the op on the current stream."""
        self._compute({**self._own, **joined.shared})

    def copy_out(self, joined: Joined) -> None:
        """Brings the result into its slot, on the current stream."""
        self._copy_out((_address(joined.outs[0]),))


class Solos:
    """Those that are kept.

    Args:
        staging: See `Solo`.
        device: See `Solo`.
        is_invariant: See `Solo`.
    """

    def __init__(self, staging: Staging, device: torch.device, *, is_invariant: bool) -> None:
        self._staging = staging
        self._device = device
        self._is_invariant = is_invariant
        # None for a kind that came once, False for one that cannot be prepared.
        self._kept: dict[Hashable, Solo | bool | None] = {}

    def find(self, launches: Sequence[Joined]) -> Solo | None:
        """What runs a batch that is one request; None where it must go the general way.

        The first of its kind goes that way too: most kinds that come once never come again. The current stream is the one
        that will compute.
        """
        if len(launches) != 1 or len(launches[0].outs) != 1:
            return None
        joined = launches[0]
        key = _key_of(joined)
        if key is None:
            return None
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = None
            return None
        solo = self._kept[key]
        if solo is None or (isinstance(solo, Solo) and not solo.is_busy and not solo.fits(joined)):
            solo = self._kept[key] = self._make(joined)
        return solo if isinstance(solo, Solo) and solo.fits(joined) else None

    def _make(self, joined: Joined) -> Solo | bool:
        places = [source for (source,), _ in joined.gathered.values()]
        if not self._staging.can_address((*places, *joined.outs)):
            return False
        try:
            return Solo(joined, self._staging, self._device, is_invariant=self._is_invariant)
        except ValueError:
            return False


def _key_of(joined: Joined) -> Hashable | None:
    """What requests of one kind have in common; None for one that is not worth it."""
    (out,) = joined.outs
    host_bytes = out.type.nbytes
    is_empty = not host_bytes
    own = []
    for name, (sources, _) in joined.gathered.items():
        if len(sources) != 1 or sources[0].fortran:
            return None
        nbytes = sources[0].type.nbytes
        host_bytes += nbytes
        is_empty |= not nbytes
        # Where it begins within a word decides how it is copied.
        own.append((name, sources[0].type, _address(sources[0]) % 8))
    if not own or is_empty or host_bytes > MOST_BYTES:
        return None
    shared = tuple((name, id(tensor)) for name, tensor in joined.shared.items())
    return (joined.options, tuple(own), shared, out.type, _address(out) % 8)


def _address(place: HostBytes) -> int:
    return place.mapped.data_ptr() + place.offset


def _prepare(options: Options, inputs: Mapping[str, torch.Tensor], out: torch.Tensor, *, is_invariant: bool) -> Compute:
    """The op with all but its residents' addresses bound.

    Raises:
        ValueError: It takes several launches, or has no elements.
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

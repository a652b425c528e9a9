"""Streams and events of one device, and a batch on its way through them.

A batch flows host → device on one stream, through the kernels on a second, and back on a third. Each stream waits for
the one before by an event, so batches overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewire.service.engine.backends.contract import DeviceLost
from tilewire.service.ipc.messages import Timings


def timed_event() -> torch.cuda.Event:
    """Makes an event that can be timed."""
    return torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class Marks:
    """The four moments of a batch on the device."""

    begin: torch.cuda.Event
    staged: torch.cuda.Event
    computed: torch.cuda.Event
    end: torch.cuda.Event


class Pipeline:
    """The streams of one device.

    Args:
        stage_in: Stream for copies to the device.
        compute: Stream for kernels.
        stage_out: Stream for copies from the device.
        use: Makes a stream the current one. `set_stream` and not `stream`, which takes a fifth of the time of a launch.
        new_event: Makes an event.
    """

    def __init__(
        self,
        stage_in: torch.cuda.Stream,
        compute: torch.cuda.Stream,
        stage_out: torch.cuda.Stream,
        use: Callable[[torch.cuda.Stream], Any] = torch.cuda.set_stream,
        new_event: Callable[[], torch.cuda.Event] = timed_event,
    ) -> None:
        self.stage_in = stage_in
        self.compute = compute
        self.stage_out = stage_out
        self.use = use
        self.new_event = new_event
        self._spare: list[Marks] = []

    def marks(self) -> Marks:
        """Returns events for a batch; `recycle` takes them back."""
        return self._spare.pop() if self._spare else Marks(*(self.new_event() for _ in range(4)))

    def recycle(self, marks: Marks) -> None:
        """Takes back the events of a batch that is over."""
        self._spare.append(marks)


# Events around one launch.
Around = tuple[torch.cuda.Event, torch.cuda.Event]


class InFlight:
    """A batch on the device.

    Args:
        marks: Recorded events.
        held: Every tensor that a queued copy or kernel touches.
        pipeline: Takes the events back.
        launches: Events around each launch, where other things happened between them.
        on_end: Called when the batch is over.
    """

    rings = False

    def __init__(
        self,
        marks: Marks,
        held: list[torch.Tensor],
        pipeline: Pipeline,
        launches: Sequence[Around] = (),
        on_end: Callable[[], None] | None = None,
    ) -> None:
        self._marks = marks
        self._held = held
        self._pipeline = pipeline
        self._launches = launches or ((marks.staged, marks.computed),)
        self._on_end = on_end

    def is_done(self) -> bool:
        """Queries the device, which costs a microsecond or two.

        Raises:
            DeviceLost: A copy or a kernel failed; the context is gone with it.
        """
        try:
            return bool(self._marks.end.query())
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error

    def wait(self) -> Timings:
        """Blocks until the results are in their slots.

        Raises:
            DeviceLost: A copy or a kernel failed; the context is gone with it.
        """
        marks = self._marks
        try:
            marks.end.synchronize()
            timings = Timings(
                h2d_ns=int(marks.begin.elapsed_time(marks.staged) * 1e6),
                kernel_ns=int(sum(begin.elapsed_time(end) for begin, end in self._launches) * 1e6),
                d2h_ns=int(marks.computed.elapsed_time(marks.end) * 1e6),
            )
        except RuntimeError as error:
            raise DeviceLost(str(error)) from error
        self._held.clear()
        self._pipeline.recycle(marks)
        if self._on_end is not None:
            self._on_end()
        return timings

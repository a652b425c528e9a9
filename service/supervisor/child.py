"""How a gateway or an engine process lives under the supervisor: its first words, its control link, its end.

A child's standard input is a socket to the supervisor. The first frame on it is the child's settings; after that the
supervisor may say `Drain`, and the child says `Ready`. End of file means that the supervisor is gone, and is a `Drain` too:
no child outlives it. Knows neither HTTP nor a device.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from typing import TypeVar

import msgspec

from tilewire.service.ipc.link import Link
from tilewire.service.ipc.messages import LENGTH_BYTES

SettingsT = TypeVar("SettingsT", bound=msgspec.Struct)

CONTROL_FD = 0
# Objects are looked through as soon as 2,000 more live than died, which takes well under a millisecond; what survived, once
# more after five such looks; everything practically never.
GC_THRESHOLDS = (2_000, 5, 1_000)

# `sysexits.h` calls it EX_CONFIG: starting again would fail again, so the supervisor gives up.
EXIT_CANNOT_START = 78


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Finish what is under way, then exit with status 0."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The child does its work from now on.

    Attributes:
        detail: For the log: the device, or the listening address.
    """

    detail: str = ""


def read_settings(kind: type[SettingsT]) -> SettingsT:
    """Blocks until the supervisor has sent this child's settings.

    Raises:
        EOFError: The supervisor went away first.
        msgspec.ValidationError: It sent something else.
    """
    with socket.socket(fileno=socket.dup(CONTROL_FD)) as control:
        length = int.from_bytes(_read_exactly(control, LENGTH_BYTES), "little")
        (settings,) = msgspec.msgpack.decode(_read_exactly(control, length), type=tuple[kind])  # type: ignore[valid-type]
    assert isinstance(settings, kind), "This is a bug."
    return settings


def settle() -> None:
    """What lives now lives for ever: the garbage collector, which would take up to 0.1 s over it, need not look again.

    What is made while serving is freed by its last reference; the collector looks for cycles in few objects at a time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def connect_control(on_drain: Callable[[], None]) -> Link[Drain]:
    """Opens the control link.

    Args:
        on_drain: Called on `Drain` and when the supervisor is gone; may be called twice.
    """
    control = socket.socket(fileno=socket.dup(CONTROL_FD))
    control.setblocking(False)
    link: Link[Drain] = Link(Drain, lambda _drain: on_drain(), on_drain)
    await asyncio.get_running_loop().connect_accepted_socket(lambda: link, control)
    return link


def _read_exactly(control: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        more = control.recv(nbytes - len(data))
        if not more:
            raise EOFError("the supervisor went away")
        data += more
    return data

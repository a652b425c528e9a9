"""Registers, lists and forgets clients' shared memory, for any transport. The engines decide what can be registered."""

from __future__ import annotations

from tilewire.service.errors import InvalidRequest, NotOffered, UnknownName
from tilewire.service.gateway.auth.authenticator import Access, authorise
from tilewire.service.gateway.codecs.strict_json import kind_of
from tilewire.service.gateway.request.context import Gateway
from tilewire.service.ipc.messages import RegionInfo

MAX_NAME_CHARACTERS = 255
# Offsets and sizes cross the socket as 64-bit integers.
MAX_BYTES = 2**63 - 1


async def list_regions(gateway: Gateway, access: Access, name: str | None = None) -> list[dict[str, object]]:
    """Returns the description of a region, or those of all.

    Raises:
        Forbidden: The key may not.
        UnknownName: There is none of that name.
    """
    _check_right(gateway, access)
    found = await gateway.engines.regions(None if name is None else _text(name, "name"))
    return [{"name": one.name, "key": one.key, "offset": one.offset, "byte_size": one.byte_size} for one in found]


def check_registration(gateway: Gateway, access: Access) -> None:
    """Checks that a client may register regions at all, before the registration is read.

    Raises:
        NotOffered: Shared memory is off.
        Forbidden: The key may not.
    """
    check_allowed(gateway.settings.allow_shared_memory)
    _check_right(gateway, access)


async def forget_regions(gateway: Gateway, access: Access, name: str | None = None) -> None:
    """Forgets a region, or all; no error when there is none.

    Raises:
        Forbidden: The key may not.
    """
    _check_right(gateway, access)
    await gateway.engines.unregister_region(None if name is None else _text(name, "name"))


def _check_right(gateway: Gateway, access: Access) -> None:
    """Refuses keys without the right, where there is shared memory; elsewhere any load generator may unregister nothing."""
    if gateway.settings.allow_shared_memory:
        authorise(access, shared_memory=True)


def make_region(name: str, key: object, offset: object, byte_size: object) -> RegionInfo:
    """Checks the parts of a registration.

    Raises:
        InvalidRequest: One cannot be right; the detail names it.
    """
    return RegionInfo(_text(name, "name"), _text(key, "key"), _size(offset, "offset"), _size(byte_size, "byte_size", 1))


def no_cuda(name: str) -> InvalidRequest:
    """The refusal of a region of CUDA shared memory."""
    return InvalidRequest(f"CUDA shared memory is not offered, so {name[:64]!r} cannot be registered")


def check_no_cuda(name: str) -> None:
    """Refuses to show a region of CUDA shared memory.

    Raises:
        UnknownName: One is named.
    """
    if name:
        raise UnknownName(f"no CUDA shared memory region {name[:64]!r} is registered")


def check_allowed(is_allowed: bool) -> None:
    """Refuses when shared memory is off.

    Raises:
        NotOffered: It is.
    """
    if not is_allowed:
        raise NotOffered("shared memory is off on this server; --allow-shared-memory turns it on")


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARACTERS or not value.isprintable():
        shown = repr(value[:64]) if isinstance(value, str) else kind_of(value)
        raise InvalidRequest(f"{field}: expected 1 to {MAX_NAME_CHARACTERS} printable characters; got {shown}")
    return value


def _size(value: object, field: str, min_bytes: int = 0) -> int:
    # Not isinstance: JSON's true is an int there.
    if type(value) is not int or not min_bytes <= value <= MAX_BYTES:
        raise InvalidRequest(f"{field}: expected a whole number of bytes in [{min_bytes}, 2^63 - 1]")
    return value

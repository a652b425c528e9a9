"""Flows: the senders among whom memory and devices are shared fairly.

A flow is an API key, or a client's address where no key is needed. Its number is the same in every gateway.
"""

from __future__ import annotations

import functools
import hashlib
import ipaddress
from typing import NamedTuple

# A sender may own all addresses of such a network, so it is one flow.
IPV6_PREFIX = 64

# Addresses whose numbers are kept: the connections of a busy gateway.
MAX_ADDRESSES = 4096


class Flow(NamedTuple):
    """One sender.

    Attributes:
        id: Number of it; 32 bits of a hash.
        weight: Share beside those of others.
    """

    id: int = 0
    weight: int = 1


NO_FLOW = Flow()


def flow_of_key(name: str, weight: int) -> Flow:
    """Returns the flow of an API key."""
    return Flow(_number_of(f"key {name}"), weight)


@functools.lru_cache(MAX_ADDRESSES)
def flow_of_address(host: str) -> Flow:
    """Returns the flow of a client by its address, or whatever a server gives for one; empty for a Unix socket."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return Flow(_number_of(f"client {host}"))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        address = mapped
    prefix = IPV6_PREFIX if isinstance(address, ipaddress.IPv6Address) else address.max_prefixlen
    return Flow(_number_of(f"client {ipaddress.ip_network((address, prefix), strict=False)}"))


def _number_of(sender: str) -> int:
    return int.from_bytes(hashlib.sha256(sender.encode()).digest()[:4], "little")

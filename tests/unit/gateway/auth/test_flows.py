"""Who is one sender: a key, an address, a network of IPv6; never the key's name and an address by chance."""

from __future__ import annotations

import pytest

from tilewire.service.gateway.auth.flows import Flow, flow_of_address, flow_of_key


def test_keys_are_told_apart_by_name_and_keep_their_weight() -> None:
    assert flow_of_key("a", 3) == Flow(flow_of_key("a", 1).id, 3)
    assert flow_of_key("a", 1).id != flow_of_key("b", 1).id
    assert flow_of_key("10.0.0.1", 1) != flow_of_address("10.0.0.1")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("", "", True),
        ("testclient", "", False),
    ],
)
def test_addresses(one: str, other: str, is_same: bool) -> None:
    assert (flow_of_address(one) == flow_of_address(other)) is is_same


def test_numbers_are_the_same_in_every_process() -> None:
    assert flow_of_key("flood", 1).id == 435800553

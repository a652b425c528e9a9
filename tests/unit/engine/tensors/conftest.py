"""A home engine, the vault and an engine that follows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.support.resident_chain import Chain, Offers


@pytest.fixture
def chain() -> Iterator[Chain]:
    with contextlib.ExitStack() as stack:
        yield Chain(stack)


@pytest.fixture
def offers(chain: Chain) -> Iterator[Offers]:
    with contextlib.ExitStack() as stack:
        yield Offers(chain, stack)

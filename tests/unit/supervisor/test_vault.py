"""The vault's sending end when nobody is left to receive."""

from __future__ import annotations

import socket

import pytest

from tilewire.service.errors import Unavailable
from tilewire.service.supervisor.vault import VaultWriter


def test_a_deposit_that_nobody_takes_is_unavailable() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    writer = VaultWriter(ours.detach())
    with pytest.raises(Unavailable, match="supervisor"):
        writer.request_copy("w")
    writer.close()

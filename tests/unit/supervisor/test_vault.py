"""The ends of the vault's sockets when the supervisor is gone."""

from __future__ import annotations

import socket

import pytest

from tilewire.service.errors import Unavailable
from tilewire.service.supervisor.vault import VaultFollower, VaultWriter


def test_a_deposit_that_nobody_takes_is_unavailable() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    writer = VaultWriter(ours.detach())
    with pytest.raises(Unavailable, match="supervisor"):
        writer.request_copy("w")
    writer.close()


def test_a_follower_whose_supervisor_was_killed_has_no_more_changes() -> None:
    """A peer that is gone with messages unread is an error of the socket, not its end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"unread")
        follower = VaultFollower(ours.fileno())
        theirs.close()
        assert follower.take() == []
        assert not follower.is_open
        follower.close()

"""A TLS client that changes its keys again and again, which Python's own cannot do. Owns no socket."""

from __future__ import annotations

import _ssl
import ctypes
import ctypes.util

# The library that Python's own TLS uses; the system's where Python has it built in.
_LIBRARY = ctypes.CDLL(getattr(_ssl, "__file__", None) or ctypes.util.find_library("ssl"))
_POINTERS = ("TLS_client_method", "SSL_CTX_new", "SSL_new", "BIO_s_mem", "BIO_new")
_OUT_BYTES = 2**20


def _call(name: str, *arguments: ctypes.c_void_p | bytes | ctypes.Array[ctypes.c_char] | int) -> int:
    function = getattr(_LIBRARY, name)
    function.restype = ctypes.c_void_p if name in _POINTERS else ctypes.c_int
    return int(function(*arguments) or 0)


class KeyChanges:
    """One connection of the client, which trusts every server; OpenSSL's objects live as long as the process.

    Attributes:
        is_open: The handshake is done.
    """

    def __init__(self) -> None:
        context = ctypes.c_void_p(_call("SSL_CTX_new", ctypes.c_void_p(_call("TLS_client_method"))))
        self._tls = ctypes.c_void_p(_call("SSL_new", context))
        memory = ctypes.c_void_p(_call("BIO_s_mem"))
        self._incoming, self._outgoing = (ctypes.c_void_p(_call("BIO_new", memory)) for _ in range(2))
        _LIBRARY.SSL_set_bio(self._tls, self._incoming, self._outgoing)
        _LIBRARY.SSL_set_connect_state(self._tls)
        self._out = ctypes.create_string_buffer(_OUT_BYTES)
        self.is_open = False

    def shake_hands(self, came: bytes) -> bytes:
        """Takes what came from the server; returns what is to be sent."""
        if came:
            _call("BIO_write", self._incoming, came, len(came))
        self.is_open = _call("SSL_do_handshake", self._tls) == 1
        return self._take()

    def change(self, times: int) -> bytes:
        """Changes the keys so many times."""
        for _ in range(times):
            _call("SSL_key_update", self._tls, 0)
            _call("SSL_do_handshake", self._tls)
        return self._take()

    def write(self, data: bytes) -> bytes:
        """Encrypts data."""
        _call("SSL_write", self._tls, data, len(data))
        return self._take()

    def _take(self) -> bytes:
        nbytes = _call("BIO_read", self._outgoing, self._out, _OUT_BYTES)
        return self._out.raw[: max(nbytes, 0)]

"""The TLS that gateways speak: one context from the files of `--tls-certificate`, `--tls-key` and `--tls-client-ca`.

Owns the versions, what is required of clients, and the reload of a certificate. The supervisor makes one to find mistakes
before anything starts, each gateway one to serve with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

from tilewire.service.config.process import TlsSettings
from tilewire.service.watched_files import FileWatch, UnusableFile, check_regular

logger = logging.getLogger(__name__)

RELOAD_S = 2.0


class TlsError(UnusableFile):
    """A file that cannot be used; the message says which.

    Attributes:
        is_of_clients: Whether it is that of the clients' authorities.
    """

    is_of_clients = False


def make_context(tls: TlsSettings) -> ssl.SSLContext:
    """Reads the files.

    Raises:
        TlsError: One is missing, is no PEM, is encrypted, or does not belong to the others.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        check_regular(tls.certificate)
        check_regular(tls.key)
        context.load_cert_chain(tls.certificate, tls.key, password=_refuse_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise TlsError(f"{tls.certificate} with {tls.key}: {_reason(error)}") from error
    if tls.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            check_regular(tls.client_ca)
            context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            problem = TlsError(f"{tls.client_ca}: {_reason(error)}")
            problem.is_of_clients = True
            raise problem from error
    return context


def watch_certificate(tls: TlsSettings, report: Callable[[bool], object]) -> FileWatch:
    """Returns a watch over the certificate and its key."""
    return FileWatch("the certificate stays as it was", (tls.certificate, tls.key), report)


class CurrentContext:
    """The context with which connections begin; a new one takes its place when the certificate's files change.

    A context keeps one certificate of each kind of key, and a client chooses among them. It also keeps sessions and the keys
    of tickets. In a new context there are neither certificates nor sessions of before, nor clients of an old authority.

    Args:
        tls: The files.
        report: As of `FileWatch`.

    Attributes:
        context: Context of connections that begin now.

    Raises:
        TlsError: A file cannot be used.
    """

    def __init__(self, tls: TlsSettings, report: Callable[[bool], object]) -> None:
        self._tls = tls
        self._watch = watch_certificate(tls, report)
        self.context = make_context(tls)

    async def keep_current(self) -> None:
        """Reads the files again when those of the certificate change, until cancelled; what cannot be used changes nothing."""
        while True:
            await asyncio.sleep(RELOAD_S)
            if (fresh := self._watch.take(lambda: make_context(self._tls))) is not None:
                self.context = fresh
                logger.info("the certificate was read again: %s", self._tls.certificate)


def _refuse_password() -> str:
    raise ValueError("the key is encrypted, and nobody is here to type its password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)

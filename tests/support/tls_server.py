"""Certificates for tests, from an authority of their own, and contexts of clients that know it. Owns no server."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificates:
    """Files in PEM."""

    authority: Path
    certificate: Path
    key: Path
    client: Path

    @property
    def flags(self) -> tuple[str, ...]:
        """Of a server that serves HTTPS."""
        return ("--tls-certificate", str(self.certificate), "--tls-key", str(self.key))

    def context(self, *, with_client: bool = False) -> ssl.SSLContext:
        """Of a client that trusts the authority."""
        context = ssl.create_default_context(cafile=str(self.authority))
        if with_client:
            context.load_cert_chain(self.client)
        return context


def make_certificates(folder: Path, kind: trustme.KeyType = trustme.KeyType.ECDSA) -> Certificates:
    """An authority, a server's certificate for the loopback with a key of that kind, and a client's."""
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost", key_type=kind)
    client = authority.issue_cert("tests@example.org")
    found = Certificates(folder / "ca.pem", folder / "chain.pem", folder / "key.pem", folder / "client.pem")
    authority.cert_pem.write_to_path(str(found.authority))
    found.certificate.write_bytes(b"".join(one.bytes() for one in server.cert_chain_pems))
    server.private_key_pem.write_to_path(str(found.key))
    client.private_key_and_cert_chain_pem.write_to_path(str(found.client))
    return found

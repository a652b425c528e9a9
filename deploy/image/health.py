"""The image's health check: exit status 0 when a gateway answers that it lives, whatever the load. Standard library only.

It asks where the service listens, and the port that is apart for metrics and health, where there is one: that has no TLS. With
TLS on the public port it does not verify the certificate, which need not name that address.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping

TIMEOUT_S = 4
# An address for all interfaces is answered at the loopback of its family.
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main() -> int:
    """Asks once."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    try:
        with opener.open(f"{address(os.environ)}/healthz", timeout=TIMEOUT_S):
            return 0
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


def address(settings: Mapping[str, str]) -> str:
    """Where to ask."""
    if apart := settings.get("TILEWIRE_METRICS_PORT"):
        return f"http://{_at(settings.get('TILEWIRE_METRICS_HOST'))}:{apart}"
    port = settings.get("TILEWIRE_PORT") or settings.get("PORT") or "8000"
    scheme = "https" if settings.get("TILEWIRE_TLS_CERTIFICATE") else "http"
    return f"{scheme}://{_at(settings.get('TILEWIRE_HOST'))}:{port}"


def _at(host: str | None) -> str:
    """A host as it stands in a URL; without one, the loopback."""
    found = LOOPBACKS.get(host or "127.0.0.1", host or "127.0.0.1")
    return f"[{found}]" if ":" in found else found


if __name__ == "__main__":
    sys.exit(main())

"""The image's health check: exit status 0 when a gateway answers that it lives, whatever the load. Standard library only.

It asks the port that is apart for metrics and health, where there is one: that has no TLS. With TLS on the public port it does
not verify the certificate, which need not name the loopback.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.request
from collections.abc import Mapping

TIMEOUT_S = 4


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
        return f"http://127.0.0.1:{apart}"
    port = settings.get("TILEWIRE_PORT") or settings.get("PORT") or "8000"
    return f"{'https' if settings.get('TILEWIRE_TLS_CERTIFICATE') else 'http'}://127.0.0.1:{port}"


if __name__ == "__main__":
    sys.exit(main())

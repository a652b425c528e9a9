"""The image's health check: exit status 0 when a gateway answers that it lives, whatever the load. Standard library only."""

from __future__ import annotations

import os
import sys
import urllib.request

TIMEOUT_S = 4


def main() -> int:
    """Asks once."""
    port = os.environ.get("TILEWIRE_PORT") or os.environ.get("PORT") or "8000"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=TIMEOUT_S):
            return 0
    except OSError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

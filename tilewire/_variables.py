"""Environment variables of the client's commands."""

from __future__ import annotations

URL_VARIABLE = "TILEWIRE_URL"
KEY_VARIABLE = "TILEWIRE_KEY"
CLIENT_VARIABLES = (URL_VARIABLE, KEY_VARIABLE)

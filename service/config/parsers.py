"""Parses the settings that have a syntax of their own."""

from __future__ import annotations

from urllib.parse import urlsplit

KEYLESS = ("docs", "console", "metrics")


def keyless_of(words: str) -> tuple[str, ...]:
    """Reads a `--keyless` value.

    Raises:
        ValueError: A word that is none of docs, console, metrics, or `none` alone.
    """
    if words.strip() in ("", "none"):
        return ()
    parts = tuple(part.strip() for part in words.split(","))
    if not set(parts) <= set(KEYLESS):
        raise ValueError(f"keyless: {words!r} is not some of {', '.join(KEYLESS)}, parted by commas, or none")
    return parts


def check_url(url: str) -> None:
    """Checks the address of a server.

    Raises:
        ValueError: It has no scheme, no host, or a space, or its port is none.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not _is_sound(url):
        raise ValueError("expected a URL, such as http://localhost:4318")


def origins_of(origins: str) -> tuple[str, ...]:
    """Reads an `--allow-origin` value.

    Raises:
        ValueError: A part that is neither `*` nor a scheme and a host, as browsers send them.
    """
    parts = tuple(part.strip() for part in origins.split(",") if part.strip())
    for part in parts:
        url = urlsplit(part)
        is_origin = url.scheme in ("http", "https") and url.netloc == part.partition("://")[2] != "" and "@" not in part
        if part != "*" and not (is_origin and part == part.lower() and _is_sound(part)):
            raise ValueError(f"allow_origin: {part!r} is neither * nor an origin, such as https://example.org:8443")
    return parts


def _is_sound(url: str) -> bool:
    """Whether an address has no space, and a port that can be one; without a port it is the scheme's own."""
    try:
        return urlsplit(url).port != 0 and not any(map(str.isspace, url))
    except ValueError:
        return False


def devices_of(device: str) -> list[str]:
    """Reads a `--device` value: one name for each engine.

    It is `auto`, `cpu`, `cuda`, `cuda:1` or `cuda:0,1`; or `cpu:0,1` for several engines without a GPU, to try them.

    Raises:
        ValueError: Anything else.
    """
    if device in ("auto", "cpu"):
        return [device]
    kind, _, numbers = device.partition(":")
    indices = numbers.split(",") if numbers else ["0"]
    is_listed = all(index.isdecimal() for index in indices) and len(set(map(int, indices))) == len(indices)
    if kind not in ("cuda", "cpu") or not is_listed:
        raise ValueError(f"device: {device!r} is not auto, cpu, cuda:0 or cuda:0,1")
    return [f"{kind}:{int(index)}" for index in indices]

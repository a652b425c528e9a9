"""Answers GET with OK and POST with its body: the application that `bench_http11` runs under uvicorn alone."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send

METHODS = ("GET", "HEAD", "POST")


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Serves one request."""
    if scope["type"] != "http":
        return
    pieces, is_more = [b"OK"] if scope["method"] == "GET" else [], True
    while is_more:
        message = await receive()
        if message["type"] != "http.request":
            return
        is_more = message.get("more_body", False)
        pieces.append(message.get("body", b"") if scope["method"] == "POST" else b"")
    status = 200 if scope["method"] in METHODS else 405
    body = b"".join(pieces)
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", b"%d" % len(body)),
        (b"allow", ", ".join(METHODS).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body if scope["method"] != "HEAD" else b""})

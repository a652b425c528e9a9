"""The one layer around every route: request ids, the door, error answers, the report. Pure ASGI: it never touches a body.

Owns the `Exchange` of each request. Knows no route.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewire.service.errors import ClientGone, InternalError, TilewireError
from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.context import Exchange, Gateway, Incoming, connection_of, forget, headers_of
from tilewire.service.gateway.request.response import error_response, send_unread
from tilewire.service.gateway.telemetry.tracing import parse_traceparent
from tilewire.service.telemetry import log

# Printable ASCII without spaces: nothing that could start another header or another line of a log.
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)

logger: structlog.stdlib.BoundLogger = structlog.get_logger("tilewire.gateway")


class ExchangeMiddleware:
    """Makes an `Exchange` for each request and ends it.

    Args:
        app: What answers.
        gateway: The parts.
    """

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = headers_of(scope)
        incoming = Incoming(receive, connection_of(scope))
        exchange = exchange_for(headers, incoming)
        # Other servers need not offer a state.
        scope.setdefault("state", {})["exchange"] = exchange
        # Each request is a task of its own, and so has a context of its own.
        log.request_id.set(exchange.request_id)
        outgoing = _Outgoing(send, exchange, self._gateway)
        try:
            self._admit(exchange, scope["path"])
            await self._app(scope, exchange.incoming, outgoing)
        except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
            await self._answer(as_tilewire(error, exchange), scope, outgoing)
        finally:
            report(self._gateway, exchange, scope, outgoing.status)
            forget(scope)

    def _admit(self, exchange: Exchange, path: str) -> None:
        """Nothing but health is reached without passing here, whatever the spelling of its path."""
        declared = exchange.content_length or 0
        exchange.access = self._gateway.doorman.identify(path, exchange.headers)
        self._gateway.doorman.admit(exchange.access, declared)
        exchange.charged_bytes = declared

    async def _answer(self, error: TilewireError, scope: Scope, outgoing: _Outgoing) -> None:
        """Answers an error, unless an answer has begun or nobody is there to read it."""
        exchange: Exchange = scope["state"]["exchange"]
        if error.is_refusal:
            self._gateway.metrics.observe_rejection(error.code)
        if outgoing.status is not None:
            raise error
        if isinstance(error, ClientGone):
            outgoing.status = error.status
            return
        await send_unread(error_response(error, exchange, scope["path"]), scope, exchange.incoming, outgoing)


class _Outgoing:
    """`send`, with the headers that every answer has."""

    def __init__(self, send: Send, exchange: Exchange, gateway: Gateway) -> None:
        self._send = send
        self._exchange = exchange
        self._admission = gateway.admission
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((b"x-request-id", self._exchange.request_id.encode("ascii")))
            if self._admission.is_draining:
                message["headers"].append((b"connection", b"close"))
        elif message["type"] == "http.response.body":
            self._exchange.sent_bytes += len(message.get("body", b""))
        await self._send(message)


def exchange_for(headers: Mapping[str, str], incoming: Incoming) -> Exchange:
    """A request's exchange, with its id and its caller's span, if its headers tell any."""
    exchange = Exchange(_request_id(headers.get("x-request-id")), incoming, headers)
    if "traceparent" in headers:
        exchange.trace = parse_traceparent(headers["traceparent"], headers.get("tracestate", ""))
    return exchange


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return os.urandom(16).hex()


def as_tilewire(error: Exception, exchange: Exchange) -> TilewireError:
    """The error of the tree that answers whatever was raised; what is none of it is logged and told nobody."""
    if isinstance(error, TilewireError):
        return error
    logger.error("a request failed", request_id=exchange.request_id, exc_info=error)
    return InternalError("internal error; the request id leads to the log")

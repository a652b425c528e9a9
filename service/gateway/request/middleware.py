"""The one layer around the routes of frameworks: request ids, keys, errors, the report. Pure ASGI: it never touches a body.

Ops do not pass here: `handle` does the same for them, with the same functions.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tilewire.service.gateway.request.access_log import report
from tilewire.service.gateway.request.asgi import open_context
from tilewire.service.gateway.request.context import STREAM, Gateway
from tilewire.service.gateway.request.handle import admit
from tilewire.service.gateway.request.response import respond_error, respond_preflight, respond_route
from tilewire.service.telemetry import log


class ContextMiddleware:
    """Makes a `RequestContext` for each request and ends it."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI's call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = open_context(scope, receive, send)
        # Other servers need not offer a state.
        scope.setdefault("state", {})["context"] = context
        # Each request is a task of its own, and so has a context of its own.
        log.request_id.set(context.request_id)
        start: Message = {}

        async def outgoing(message: Message) -> None:
            """Writes the answer of a route, which comes in two messages: its head, and its whole body."""
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                await respond_route(self._gateway, context, start["status"], start["headers"], message["body"])

        try:
            if await respond_preflight(self._gateway, context):
                return
            admit(self._gateway, context)
            await self._app(scope, receive, outgoing)
        except Exception as error:  # noqa: BLE001  (the last line of defence: it is logged and answered)
            written = respond_error(self._gateway, context, error)
            if written is not None:
                await written
        finally:
            context.route = getattr(scope.get("route"), "path_format", "")
            report(self._gateway, context)
            _forget(scope)


def _forget(scope: Scope) -> None:
    """Takes out of the scope of a request that has ended what leads back to it.

    Without cycles everything of a request is freed at once. Cycles the garbage collector finds for hundreds of requests
    together, while others wait.
    """
    scope["state"].pop("context", None)
    scope.get("extensions", {}).pop(STREAM, None)

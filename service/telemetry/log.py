"""Configures the log of every process: structlog events, and libraries' records through the same formatter."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

import structlog

from tilewire.service.config.process import LogSettings
from tilewire.service.telemetry.log_handler import handler_of

# The request that is being worked on; every event that is logged meanwhile carries it, in the gateway and in the engine.
request_id: ContextVar[str] = ContextVar("request_id", default="")

# Control characters, of ASCII and of Latin-1, by how they are shown.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}

# Fields that records of the standard library may add by `extra=`.
EXTRA = ("request_id", "request_ids")


def configure(settings: LogSettings, *, process: str) -> structlog.stdlib.BoundLogger:
    """Sets logging up for this process, whose name is bound to every event: `supervisor`, `gateway-0`, `engine-0`.

    Returns:
        The process's logger.
    """
    shared: list[structlog.typing.Processor] = [
        _bind(process),
        structlog.stdlib.ExtraAdder(allow=EXTRA),
        _add_request_id,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if settings.format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    )
    before = structlog.processors.format_exc_info if settings.format == "json" else _escape_controls
    last = [before, renderer]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
    )
    handler = handler_of(sys.stderr)
    handler.setFormatter(formatter)
    logging.root.handlers = [handler]
    logging.root.setLevel(settings.level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger("tilewire")
    return logger


def _add_request_id(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if current := request_id.get():
        event.setdefault("request_id", current)
    return event


def _escape_controls(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Escapes what a terminal would obey: clients choose paths and ids. Traces keep their lines."""
    return {
        name: value.translate(_CONTROLS) if isinstance(value, str) and name not in ("exception", "stack") else value
        for name, value in event.items()
    }


def _bind(process: str) -> structlog.typing.Processor:
    def bind(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event["process"] = process
        return event

    return bind

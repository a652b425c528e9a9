"""Checks what settings name, before any process is started: files, packages, and variables that packages read."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import structlog

from tilewire._installing import how_to_install
from tilewire._version import __version__
from tilewire.service.config.machine import memory_bytes
from tilewire.service.config.parsers import check_url
from tilewire.service.config.process import TlsSettings, TracingSettings
from tilewire.service.config.settings import Settings, flag_name
from tilewire.service.keys import KeysError, is_readable_by_everyone, read_keys
from tilewire.service.tls import TlsError, make_context
from tilewire.service.watched_files import check_regular

GRPC_MISSING = f"gRPC needs packages that are missing: {how_to_install('grpc')}"
TRACING_MISSING = f"tracing needs packages that are missing: {how_to_install('otel')}"


# Settings that name a folder, and the files there that are loaded before ready; empty for none.
FOLDERS = {"tensors_dir": "*.safetensors", "programs_dir": "*.json", "store": ""}


# Settings that do nothing without another one.
NEEDED = {
    "store_check_s": "store",
    "store_wait_bytes": "store",
    "shared_memory_prefix": "allow_shared_memory",
    "shared_memory_bytes": "allow_shared_memory",
    "keyless": "api_keys_file",
    "metrics_host": "metrics_port",
    "trace_ratio": "otlp_endpoint",
}


class PreflightError(Exception):
    """A setting that cannot work here.

    Attributes:
        setting: Its name, or that of a variable which a package reads.
    """

    def __init__(self, setting: str, message: str) -> None:
        super().__init__(message)
        self.setting = setting


def check(settings: Settings, logger: structlog.stdlib.BoundLogger) -> None:
    """Reads and makes what gateways will read and make, and says what is wrong with it.

    Raises:
        PreflightError: Serving with these settings would fail, or would not do what they say.
    """
    for name, needed in without_effect(settings):
        logger.warning("a setting without effect", setting=flag_name(name), needs=flag_name(needed))
    _check_memory(settings, logger)
    _check_folders(settings, logger)
    _check_keys(settings, logger)
    if settings.tls is not None:
        _check_tls(settings, settings.tls)
    if settings.grpc_port is not None and not has_grpc():
        raise PreflightError("grpc_port", GRPC_MISSING)
    if settings.tracing is not None:
        _check_tracing(settings, settings.tracing, logger)


def _check_memory(settings: Settings, logger: structlog.stdlib.BoundLogger) -> None:
    """Warns where arena and residents do not fit: an engine that was killed for memory gets back what had filled it."""
    wanted, memory = settings.num_arena_bytes + settings.resident_bytes, memory_bytes()
    if wanted > memory:
        logger.warning(
            "arena and residents may exceed the memory",
            arena_bytes=settings.num_arena_bytes,
            resident_bytes=settings.resident_bytes,
            memory_bytes=memory,
            remedy="more memory, or lower --resident-bytes or --arena-bytes",
        )


def without_effect(settings: Settings) -> list[tuple[str, str]]:
    """Lists the settings that were set and that nothing reads, each with the one that it needs."""
    # A port of 0 is one, and the collector may be that of the environment.
    there = {"metrics_port": settings.metrics_port is not None, "otlp_endpoint": settings.tracing is not None}
    return [
        (name, needed)
        for name, needed in NEEDED.items()
        if name in settings.model_fields_set and not there.get(needed, bool(getattr(settings, needed)))
    ]


def _check_folders(settings: Settings, logger: structlog.stdlib.BoundLogger) -> None:
    """Looks into each folder: an engine would say the same, seconds later, and not by which setting it has the folder."""
    for name, pattern in FOLDERS.items():
        folder: Path | None = getattr(settings, name)
        if folder is None:
            continue
        try:
            os.scandir(folder).close()
        except OSError as error:
            raise PreflightError(name, f"{folder}: {error.strerror}") from error
        if pattern and not any(folder.glob(pattern)):
            logger.warning(
                "nothing is loaded from a folder", setting=flag_name(name), folder=str(folder), missing=pattern
            )
    if settings.store is not None and not os.access(settings.store, os.W_OK | os.X_OK):
        logger.warning("the store cannot be written: changes will be 503", folder=str(settings.store))


def _check_tls(settings: Settings, tls: TlsSettings) -> None:
    """Opens each file, so that the one that is missing is named, and reads them together."""
    for name in ("tls_certificate", "tls_key", "tls_client_ca"):
        path: Path | None = getattr(settings, name)
        try:
            if path is not None:
                check_regular(path)
                path.open("rb").close()
        except OSError as error:
            raise PreflightError(name, f"{path}: {error.strerror}") from error
    try:
        make_context(tls)
    except TlsError as error:
        raise PreflightError("tls_client_ca" if error.is_of_clients else "tls_certificate", str(error)) from error


def has_grpc() -> bool:
    """Whether the packages of `tilewire[grpc]` are there."""
    return all(find_spec(name) is not None for name in ("grpc", "grpc_health", "grpc_reflection", "google.protobuf"))


def _check_tracing(settings: Settings, tracing: TracingSettings, logger: structlog.stdlib.BoundLogger) -> None:
    """Makes a recorder as each gateway will, and closes it: the packages read variables of their own at both of these lines."""
    setting = "OTEL_EXPORTER_OTLP_ENDPOINT" if settings.otlp_endpoint is None else "otlp_endpoint"
    try:
        # Imported here and not above: the packages are an extra.
        from tilewire.service.gateway.telemetry.otlp import OtlpRecorder  # noqa: PLC0415

        check_url(tracing.endpoint)
        OtlpRecorder(tracing, __version__, 0).close()
    except ModuleNotFoundError:
        if settings.otlp_endpoint is not None:
            raise PreflightError("otlp_endpoint", TRACING_MISSING) from None
        logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing is traced", reason=TRACING_MISSING)
    except Exception as error:
        given = ", ".join(sorted(name for name in os.environ if name.startswith("OTEL_")))
        raise PreflightError(setting, f"no spans can be sent: {error} (variables: {given or 'none'})") from error


def _check_keys(settings: Settings, logger: structlog.stdlib.BoundLogger) -> None:
    path = settings.api_keys_file
    if path is None:
        return
    try:
        keys = read_keys(path)
    except KeysError as error:
        raise PreflightError("api_keys_file", str(error)) from error
    if is_readable_by_everyone(path):
        logger.warning("everyone may read the API keys' file", file=str(path), remedy="chmod o-r")
    if not keys:
        logger.warning("the API keys' file has no key: nobody gets in", file=str(path))
    if settings.tls is None and settings.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("API keys cross the network in the clear", remedy="--tls-certificate, or TLS in front")

"""What one process is told at its start: the slices of `Settings` that cross to the gateways and engines.

Owns their fields only. Knows neither flags nor the environment, nor the library that reads them: a gateway starts without it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tilewire.service.ops.op import Limits
from tilewire.service.supervisor.handover import Kept, KeptRegion

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(msgspec.Struct, frozen=True):
    """How a process logs."""

    level: LogLevel = "info"
    format: LogFormat = "console"


class TlsSettings(msgspec.Struct, frozen=True):
    """Files of TLS, in PEM."""

    certificate: str
    key: str
    client_ca: str | None = None


class TracingSettings(msgspec.Struct, frozen=True):
    """Where spans go, and how many requests make some.

    Attributes:
        endpoint: The whole address, with `/v1/traces`.
        ratio: Share of the requests whose caller does not decide.
    """

    endpoint: str
    ratio: float = 1.0


class Inherited(msgspec.Struct, frozen=True):
    """Descriptors that a gateway gets from the supervisor; -1 for those that are not needed.

    Attributes:
        listener: Of `--port`.
        metrics_listener: Of `--metrics-port`.
        usage: The page on which gateways count what API keys use.
    """

    listener: int
    metrics_listener: int = -1
    usage: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        """Those that are there."""
        return tuple(fd for fd in (self.listener, self.metrics_listener, self.usage) if fd >= 0)


class GatewaySettings(msgspec.Struct, frozen=True):
    """What one gateway process needs to know; see `Settings` for the meaning of each."""

    index: int
    inherited: Inherited
    engine_addresses: list[str]
    segment_bytes: int
    huge_pages: bool = False
    max_body_bytes: int = 256 * 2**20
    max_json_bytes: int = 8 * 2**20
    max_in_flight: int = 1024
    limits: Limits = Limits()
    allow_shared_memory: bool = False
    body_timeout_s: float = 30.0
    min_body_bytes_per_s: int = 1024
    max_body_s: float = 300.0
    room_timeout_s: float = 5.0
    max_connections: int = 8192
    busy_poll_s: float = 0.0
    keep_alive_s: float = 75.0
    drain_timeout_s: float = 30.0
    log: LogSettings = LogSettings()
    access_log: bool = False
    api_keys_file: str | None = None
    keyless: tuple[str, ...] = ()
    is_read_only: bool = False
    tls: TlsSettings | None = None
    tracing: TracingSettings | None = None


class EngineSettings(msgspec.Struct, frozen=True):
    """What one engine process needs to know; see `Settings` for the meaning of each."""

    index: int
    device: str
    listen_fd: int
    vault_fd: int
    restarts: int = 0
    resident_bytes: int = 4 * 2**30
    max_batch_requests: int = 64
    max_batch_rows: int = 8192
    max_batch_bytes: int = 64 * 2**20
    max_batch_ms: float = 5.0
    max_queue_delay_us: float = 0.0
    busy_poll_s: float = 0.0
    tensors_dir: str | None = None
    warmup: str = "run"
    forbid_serving_compiles: bool = False
    batch_invariant: bool = False
    kept: list[Kept] = []
    kept_version: int = 0
    kept_regions: list[KeptRegion] = []
    allow_shared_memory: bool = False
    shared_memory_prefix: str = ""
    shared_memory_bytes: int = 16 * 2**30
    log: LogSettings = LogSettings()

"""Defines the slices of `Settings` that gateways and engines receive at their start.

Owns their fields only; a gateway starts without the library that reads flags and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tilewire.service.ops.op import Limits
from tilewire.service.supervisor.handover import Handover, OpenFile

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogSettings(msgspec.Struct, frozen=True):
    """Log settings of a process."""

    level: LogLevel = "info"
    format: LogFormat = "console"


class TlsSettings(msgspec.Struct, frozen=True):
    """Files of TLS, in PEM."""

    certificate: str
    key: str
    client_ca: str | None = None


class TracingSettings(msgspec.Struct, frozen=True):
    """Destination of spans, and the fraction of requests that are traced.

    Attributes:
        endpoint: The whole address, with `/v1/traces`.
        ratio: Share of the requests whose caller does not decide.
    """

    endpoint: str
    ratio: float = 1.0


class Inherited(msgspec.Struct, frozen=True):
    """Descriptors that a gateway gets from the supervisor; -1 for those that are not needed.

    Attributes:
        listener: Listening socket of `--port`.
        metrics_listener: Listening socket of `--metrics-port`.
        usage: The page on which gateways count what API keys use.
        board: The page on which engines show the versions of residents.
        connections: The page on which gateways show the number of their connections.
    """

    listener: int = -1
    metrics_listener: int = -1
    usage: int = -1
    board: int = -1
    connections: int = -1

    @property
    def fds(self) -> tuple[int, ...]:
        """Those that are there."""
        return tuple(fd for fd in msgspec.structs.astuple(self) if fd >= 0)

    def moved(self, to: Mapping[int, int]) -> Inherited:
        """Returns the same descriptors by their numbers in another process."""
        return Inherited(*(to[fd] for fd in msgspec.structs.astuple(self)))


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one gateway process; those that `Settings` has too have the same name and meaning.

    `grpc_address` is the address of the gateway that speaks gRPC, as the library reads it; None for those of HTTP.
    """

    index: int
    grpc_address: str | None
    inherited: Inherited
    engine_addresses: list[str]
    segment_bytes: int
    huge_pages: bool
    max_body_bytes: int
    max_json_bytes: int
    max_in_flight: int
    limits: Limits
    allow_shared_memory: bool
    body_timeout_s: float
    min_body_bytes_per_s: int
    max_body_s: float
    room_timeout_s: float
    max_connections: int
    busy_poll_s: float
    keep_alive_s: float
    drain_timeout_s: float
    log: LogSettings
    access_log: bool
    api_keys_file: str | None
    keyless: tuple[str, ...]
    is_read_only: bool
    allow_origin: tuple[str, ...] = ()
    tls: TlsSettings | None
    tracing: TracingSettings | None

    @property
    def name(self) -> str:
        """Name of the process, for logs and metrics."""
        return f"gateway-{self.index}" if self.grpc_address is None else "gateway-grpc"

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors in it."""
        return self.inherited.fds

    def moved(self, to: Mapping[int, int]) -> GatewaySettings:
        """Returns the same settings with this process's numbers of their descriptors."""
        return msgspec.structs.replace(self, inherited=self.inherited.moved(to))


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process; those that `Settings` has too have the same name and meaning."""

    index: int
    device: str
    listen_fd: int
    num_engines: int
    vault_fd: int
    board_fd: int
    restarts: int
    resident_bytes: int
    host_copy_bytes_per_s: int
    max_batch_requests: int
    max_batch_rows: int
    max_batch_bytes: int
    max_batch_ms: float
    max_queue_delay_us: float
    busy_poll_s: float
    files: tuple[OpenFile, ...]
    store: str | None
    store_check_s: float
    store_wait_bytes: int
    warmup: str
    forbid_serving_compiles: bool
    batch_invariant: bool
    is_tuned_online: bool
    kernels: str
    kept: Handover
    allow_shared_memory: bool
    shared_memory_prefix: str
    shared_memory_bytes: int
    max_body_bytes: int
    log: LogSettings

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors in it."""
        own = self.listen_fd, self.vault_fd, self.board_fd, *(one.fd for one in self.files)
        return tuple(fd for fd in (*own, *self.kept.fds) if fd >= 0)

    def moved(self, to: Mapping[int, int]) -> EngineSettings:
        """Returns the same settings with this process's numbers of their descriptors."""
        return msgspec.structs.replace(
            self,
            listen_fd=to[self.listen_fd],
            vault_fd=to[self.vault_fd],
            board_fd=to[self.board_fd],
            files=tuple(msgspec.structs.replace(one, fd=to[one.fd]) for one in self.files),
            kept=self.kept.moved(to),
        )

"""Every setting, its default and its limits; the only reader of the environment.

Owns `Settings` (what a person sets) and the narrow slices that cross to the processes. Knows no process and no socket.
`docs/configuration.md` and `tilewire serve --help` are written from `Settings`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from service.messages import TensorInfo
from service.ops import Limits

# Plain bytes, or with a unit: 512MiB, 2GB.
Bytes = Annotated[int, BeforeValidator(lambda value: int(TypeAdapter(ByteSize).validate_python(value)))]

LogFormat = Literal["console", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


class Settings(BaseSettings):
    """Settings of `tilewire serve`: each is a flag and a `TILEWIRE_…` variable; a flag wins over its variable."""

    model_config = SettingsConfigDict(env_prefix="TILEWIRE_", frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")
    device: str = Field(
        "auto",
        description="auto, cpu, cuda:0, or several engines: cuda:0,1 (or cpu:0,1). ROCm is called cuda too, as in PyTorch.",
    )
    gateways: int = Field(0, ge=0, le=256, description="Gateway processes; 0 means half of the cores, at most 4.")
    reuse_port: bool = Field(
        default=False,
        description="A listening socket for each gateway (SO_REUSEPORT), not one for all: connections spread more evenly.",
    )
    arena_bytes: Bytes = Field(
        2 * 2**30,
        ge=2**20,
        description="Shared memory for bodies and results, over all gateways. Pinned when there is a GPU.",
    )
    huge_pages: bool = Field(
        default=False,
        description="Ask for huge pages for the arena and take them at the start; the system must allow them to shared memory.",
    )
    max_body_bytes: Bytes = Field(256 * 2**20, ge=1, description="Largest request body; more is 413.")
    max_json_bytes: Bytes = Field(
        8 * 2**20,
        ge=1,
        description="Largest JSON body or answer: text is parsed in the gateway. More is 413.",
    )
    max_result_bytes: Bytes = Field(256 * 2**20, ge=1, description="Largest result; more is 422.")
    max_elements: int = Field(2**33, ge=1, description="Most elements of an operand or a result; more is 422.")
    max_rank: int = Field(8, ge=2, le=64, description="Most dimensions of an operand; more is 422.")
    max_in_flight: int = Field(1024, ge=1, description="Most requests that one gateway works on at once; more are 429.")
    resident_bytes: Bytes = Field(
        4 * 2**30, ge=0, description="Quota of resident tensors on each device; past it a PUT is 507."
    )
    max_batch_requests: int = Field(64, ge=1, le=4096, description="Most requests in one launch; 1 turns batching off.")
    max_batch_rows: int = Field(8192, ge=1, description="Most rows of results in one launch.")
    max_batch_bytes: Bytes = Field(64 * 2**20, ge=1, description="Most bytes that the requests of one launch move.")
    max_batch_ms: float = Field(5.0, gt=0, description="Longest predicted time of one launch: what the next job waits.")
    max_queue_delay_us: float = Field(
        0.0, ge=0, le=1e6, description="How long a batch waits for more requests while the device is idle."
    )
    tensors_dir: Path | None = Field(
        None, description="Folder of safetensors files that become resident before ready, as file-stem/tensor-name."
    )
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="A client that sends or reads no byte for this long is given up; a head must end by then.",
    )
    min_body_bytes_per_s: Bytes = Field(
        1024, ge=0, description="A body that takes longer than --body-timeout-s must have come at this rate; 0 for any."
    )
    max_connections: int = Field(
        8192, ge=1, description="Most connections of one gateway; those above it are answered 503 and closed."
    )
    keep_alive_s: float = Field(75.0, gt=0, description="An idle connection is closed after this long.")
    drain_timeout_s: float = Field(
        30.0, gt=0, description="After SIGTERM, requests under way have this long to finish."
    )
    log_level: LogLevel = Field("info", description="Least severe event that is logged.")
    log_format: LogFormat = Field("console", description="console for people, json for machines.")
    access_log: bool = Field(default=False, description="Log one line for each request.")

    @field_validator("device")
    @classmethod
    def _is_device(cls, value: str) -> str:
        devices_of(value)
        return value

    @property
    def num_gateways(self) -> int:
        """Gateways to run: as set, or half of the cores that this process may use, 1 to 4."""
        return self.gateways or max(1, min(4, len(os.sched_getaffinity(0)) // 2))

    @property
    def limits(self) -> Limits:
        """What one request may ask for."""
        return Limits(max_rank=self.max_rank, max_elements=self.max_elements, max_result_bytes=self.max_result_bytes)

    def gateway(self, index: int, listen_fd: int, engine_paths: list[str], metrics_folder: str) -> GatewaySettings:
        """The slice that gateway `index` gets."""
        return GatewaySettings(
            index=index,
            listen_fd=listen_fd,
            engine_paths=engine_paths,
            metrics_folder=metrics_folder,
            segment_bytes=self.arena_bytes // self.num_gateways,
            huge_pages=self.huge_pages,
            max_body_bytes=self.max_body_bytes,
            max_json_bytes=self.max_json_bytes,
            max_in_flight=self.max_in_flight,
            limits=self.limits,
            body_timeout_s=self.body_timeout_s,
            min_body_bytes_per_s=self.min_body_bytes_per_s,
            max_connections=self.max_connections,
            keep_alive_s=self.keep_alive_s,
            drain_timeout_s=self.drain_timeout_s,
            log=self.log,
            access_log=self.access_log,
        )

    def engine(self, index: int, listen_fd: int, vault_fd: int, restarts: int, kept: list[Kept]) -> EngineSettings:
        """The slice that engine `index` gets."""
        return EngineSettings(
            index=index,
            device=devices_of(self.device)[index],
            listen_fd=listen_fd,
            vault_fd=vault_fd,
            restarts=restarts,
            resident_bytes=self.resident_bytes,
            max_batch_requests=self.max_batch_requests,
            max_batch_rows=self.max_batch_rows,
            max_batch_bytes=self.max_batch_bytes,
            max_batch_ms=self.max_batch_ms,
            max_queue_delay_us=self.max_queue_delay_us,
            tensors_dir=str(self.tensors_dir) if self.tensors_dir else None,
            kept=kept,
            log=self.log,
        )

    @property
    def log(self) -> LogSettings:
        """How to log."""
        return LogSettings(level=self.log_level, format=self.log_format)


class LogSettings(msgspec.Struct, frozen=True):
    """How a process logs."""

    level: LogLevel = "info"
    format: LogFormat = "console"


class Kept(msgspec.Struct, frozen=True):
    """A resident tensor that outlived its engine, or the memory that it was deleted.

    Attributes:
        name: Of the tensor.
        info: What it is; None when it was deleted.
        fd: Descriptor of its host copy, inherited by the engine; -1 when deleted.
    """

    name: str
    info: TensorInfo | None = None
    fd: int = -1


class GatewaySettings(msgspec.Struct, frozen=True):
    """What one gateway process needs to know; see `Settings` for the meaning of each."""

    index: int
    listen_fd: int
    engine_paths: list[str]
    metrics_folder: str
    segment_bytes: int
    huge_pages: bool = False
    max_body_bytes: int = 256 * 2**20
    max_json_bytes: int = 8 * 2**20
    max_in_flight: int = 1024
    limits: Limits = Limits()
    body_timeout_s: float = 30.0
    min_body_bytes_per_s: int = 1024
    max_connections: int = 8192
    keep_alive_s: float = 75.0
    drain_timeout_s: float = 30.0
    log: LogSettings = LogSettings()
    access_log: bool = False


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
    tensors_dir: str | None = None
    kept: list[Kept] = []
    log: LogSettings = LogSettings()


def devices_of(device: str) -> list[str]:
    """Reads a `--device` value: one name for each engine.

    Args:
        device: `auto`, `cpu`, `cuda`, `cuda:1`, `cuda:0,1`; or `cpu:0,1` for several engines without a GPU, to try them.

    Raises:
        ValueError: Anything else.
    """
    if device in ("auto", "cpu"):
        return [device]
    kind, _, numbers = device.partition(":")
    indices = numbers.split(",") if numbers else ["0"]
    is_listed = all(index.isdecimal() for index in indices) and len(set(indices)) == len(indices)
    if kind not in ("cuda", "cpu") or not is_listed:
        raise ValueError(f"device: {device!r} is not auto, cpu, cuda:0 or cuda:0,1")
    return [f"{kind}:{int(index)}" for index in indices]

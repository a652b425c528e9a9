"""Defines every setting, its default and its limits; the only reader of the environment.

Owns `Settings`, what a person sets; each process gets a slice of it (`process.py`).
`docs/configuration.md` and `tilewire serve --help` are written from `Settings`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tilewire.service.config.machine import memory_bytes, num_cores, num_descriptors
from tilewire.service.config.parsers import check_url, devices_of, keyless_of, origins_of
from tilewire.service.config.process import (
    EngineSettings,
    GatewaySettings,
    Inherited,
    LogFormat,
    LogLevel,
    LogSettings,
    TlsSettings,
    TracingSettings,
)
from tilewire.service.ops.op import Limits
from tilewire.service.supervisor.handover import Handover, OpenFile

# Plain bytes, or with a unit: 512MiB, 2GB.
Bytes = Annotated[int, BeforeValidator(lambda value: int(TypeAdapter(ByteSize).validate_python(value)))]

# A lone client that sends again as soon as it is answered is back within this.
BUSY_POLL_S = 2e-3

# What fits the messages between processes.
MAX_INTEGER = 2**63 - 1
MIN_ARENA_BYTES = 2**20
# Addresses of a process reach eight times as far.
MAX_ARENA_BYTES = 2**44
# Twice the time between two signs of life.
MIN_ENGINE_TIMEOUT_S = 1.0
# The largest body and the largest result at once in each of four gateways, with the default limits.
MIN_DEFAULT_ARENA_BYTES = 2 * 2**30
# Pinning takes the system a while for each gigabyte, before ready.
MAX_DEFAULT_ARENA_BYTES = 16 * 2**30

_PARSERS: dict[str, Callable[[str], object]] = {
    "keyless": keyless_of,
    "allow_origin": origins_of,
    "device": devices_of,
}

SliceT = TypeVar("SliceT", GatewaySettings, EngineSettings)

Warmup = Literal["none", "load", "run"]
KernelChoice = Literal["triton", "fastest"]


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
    arena_bytes: Bytes = Field(
        0,
        ge=0,
        description="Shared memory for bodies and results, over all gateways; at least 1 MiB. Pinned when there is a GPU. "
        "0 means a sixteenth of the memory, at least 2 GiB (but no more than a quarter of the memory), at most 16 GiB.",
    )
    room_timeout_s: float = Field(
        5.0,
        ge=0,
        le=600,
        description="Longest wait, the body unread, for room in a gateway's arena; then the request is 429. 0 for no wait.",
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
    max_in_flight: int = Field(
        1024,
        ge=1,
        description="Most requests that one gateway works on at once; more are 429. A lone key or address gets seven eighths.",
    )
    resident_bytes: Bytes = Field(
        4 * 2**30, ge=0, description="Quota of resident tensors on each device; past it a PUT is 507."
    )
    host_copy_bytes_per_s: Bytes = Field(
        0, ge=0, description="Rate of the background copies of stored results (store=) to the host; 0 for any."
    )
    max_batch_requests: int = Field(64, ge=1, le=4096, description="Most requests in one launch; 1 turns batching off.")
    max_batch_rows: int = Field(8192, ge=1, description="Most rows of results in one launch.")
    max_batch_bytes: Bytes = Field(64 * 2**20, ge=1, description="Most bytes that the requests of one launch move.")
    max_batch_ms: float = Field(5.0, gt=0, description="Longest predicted time of one launch: what the next job waits.")
    max_queue_delay_us: float = Field(
        0.0, ge=0, le=1e6, description="How long a batch waits for more requests while the device is idle."
    )
    busy_poll_us: float = Field(
        -1.0,
        ge=-1,
        le=1e6,
        description="How long a process that expects work asks for it without sleeping: a lone request saves its wakes. "
        "-1 means 2000 where every process has a core of its own and the engine a GPU, else 0.",
    )
    batch_invariant: bool = Field(
        default=False,
        description="Give each request the same bits alone and in any batch; slower where rows are few.",
    )
    online_tuning: bool = Field(
        default=True,
        description="While a GPU is idle, race kernels on the products that took the most time, and keep the winners "
        "beside the kernel cache. Off with --batch-invariant.",
    )
    kernels: KernelChoice = Field(
        "triton",
        description="triton: our kernels compute everything. fastest: the vendor library's products take part in the races of "
        "--online-tuning, where nothing follows a product.",
    )
    warmup: Warmup = Field(
        "run",
        description="Before ready: none (compile a kernel when a request needs it), load every kernel, or also run each "
        "that this device has not run before.",
    )
    forbid_serving_compiles: bool = Field(
        default=False, description="Fail a request whose kernel must be compiled: to test that there is none."
    )
    tensors_dir: Path | None = Field(
        None, description="Folder of safetensors files that become resident before ready, as file-stem/tensor-name."
    )
    programs_dir: Path | None = Field(
        None, description="Folder of *.json files, each a program that is kept before ready under the file's stem."
    )
    store: Path | None = Field(
        None,
        description="Folder that several hosts share: uploads, programs, durable results and deletions are written there "
        "before they are acknowledged, and a host loads what it lacks.",
    )
    store_check_s: float = Field(
        2.0,
        gt=0,
        le=600,
        description="Time between two looks at what other hosts have changed in --store: a read may be older by that.",
    )
    store_wait_bytes: Bytes = Field(
        256 * 2**20,
        ge=0,
        description="Largest tensor whose load from --store a request waits for; for a larger one it is 503 with Retry-After.",
    )
    allow_shared_memory: bool = Field(
        default=False,
        description="Let clients of this host register shared memory (/dev/shm) and name it in /v2 requests.",
    )
    shared_memory_prefix: str | None = Field(
        None, description="Only shared-memory keys that begin with this may be registered; a leading / does not count."
    )
    shared_memory_bytes: Bytes = Field(
        16 * 2**30, ge=1, description="Most bytes of shared memory that may be registered; more is 422."
    )
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="A client that sends or reads no byte for this long is given up; a head must end by then.",
    )
    min_body_bytes_per_s: Bytes = Field(
        1024, ge=0, description="A body that takes longer than --body-timeout-s must have come at this rate; 0 for any."
    )
    max_body_s: float = Field(
        300.0,
        gt=0,
        description="A body that takes longer than --body-timeout-s must have come at a rate that brings all of it within "
        "this; inf for no such rate.",
    )
    max_connections: int = Field(
        8192, ge=1, description="Most connections of one gateway; those above it are answered 503 and closed."
    )
    keep_alive_s: float = Field(75.0, gt=0, description="An idle connection is closed after this long.")
    drain_timeout_s: float = Field(
        30.0, gt=0, description="After SIGTERM, requests under way have this long to finish."
    )
    spare_engine: bool = Field(
        default=True, description="Keep a process that has imported torch and waits: a dead engine is replaced sooner."
    )
    engine_timeout_s: float = Field(
        5.0,
        ge=0,
        description="An engine or a gateway that gives no sign of life for this long is replaced; 0 for never.",
    )
    log_level: LogLevel = Field("info", description="Least severe event that is logged.")
    log_format: LogFormat = Field("console", description="console for people, json for machines.")
    access_log: bool = Field(default=False, description="Log one line for each request.")
    api_keys_file: Path | None = Field(
        None, description="File of API keys: requests need one. Read again when it changes; see operations/security.md."
    )
    keyless: str = Field(
        "docs,console",
        description="What needs no key when there are keys, besides health: some of docs, console, metrics; or none.",
    )
    read_only_tensors: bool = Field(
        default=False, description="Nobody stores, replaces or deletes resident tensors, or uses shared memory."
    )
    allow_origin: str = Field(
        "",
        description="Origins whose web pages may call the service (CORS), parted by commas, or * for all; none without it.",
    )
    tls_certificate: Path | None = Field(
        None, description="Certificate chain (PEM): serve HTTPS. Read again when it changes."
    )
    tls_key: Path | None = Field(None, description="Private key of the certificate (PEM, not encrypted).")
    tls_client_ca: Path | None = Field(
        None, description="Authorities (PEM): clients must show a certificate that one of them signed."
    )
    metrics_host: str = Field("127.0.0.1", description="Address of --metrics-port.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve /metrics on this port only, with neither keys nor TLS; health too. 0 takes a free one and logs it.",
    )
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Serve the Open Inference Protocol over gRPC on this port too, in a process of its own. 0 takes a free one "
        "and logs it.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector (OTLP over HTTP) that gets spans; OTEL_EXPORTER_OTLP_ENDPOINT without it.",
    )
    trace_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those whose caller does not say by traceparent.",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _is_there(cls, value: object, info: ValidationInfo) -> object:
        # As of a variable that is set from one that is not. For Path it would be the working folder, for a host all interfaces.
        if value == "" and info.field_name not in _PARSERS:
            raise ValueError("empty; leave it out for the default")
        return value

    @field_validator("*")
    @classmethod
    def _is_bounded(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, int) and value > MAX_INTEGER:
            raise ValueError(f"at most {MAX_INTEGER}")
        if isinstance(value, float) and not math.isfinite(value) and info.field_name != "max_body_s":
            raise ValueError("expected a finite number")
        return value

    @field_validator(*_PARSERS)
    @classmethod
    def _can_be_read(cls, value: str, info: ValidationInfo) -> str:
        _PARSERS[str(info.field_name)](value)
        return value

    @model_validator(mode="after")
    def _are_together(self) -> Settings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("--tls-certificate and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("--tls-client-ca needs --tls-certificate")
        ports = {"--port": self.port, "--metrics-port": self.metrics_port, "--grpc-port": self.grpc_port}
        for flag, port in ports.items():
            other = next((one for one, taken in ports.items() if one != flag and taken == port), None)
            if port and other is not None:
                raise ValueError(f"{other}: {port} is {flag}, too; choose another")
        if self.kernels == "fastest" and not self.is_tuned_online:
            raise ValueError("--kernels fastest needs --online-tuning, whose races choose, and no --batch-invariant")
        return self

    @property
    def is_tuned_online(self) -> bool:
        """Whether races choose kernels while a GPU is idle: a new choice changes bits that `--batch-invariant` keeps."""
        return self.online_tuning and not self.batch_invariant

    @field_validator("host", "metrics_host")
    @classmethod
    def _is_copied_from_url(cls, value: str) -> str:
        # An address of IPv6 has brackets there.
        return value[1:-1] if value.startswith("[") and ":" in value and value.endswith("]") else value

    @field_validator("arena_bytes")
    @classmethod
    def _is_arena(cls, value: int) -> int:
        if value and not MIN_ARENA_BYTES <= value <= MAX_ARENA_BYTES:
            raise ValueError(f"{MIN_ARENA_BYTES} to {MAX_ARENA_BYTES} bytes, or 0")
        return value

    @field_validator("engine_timeout_s")
    @classmethod
    def _leaves_time_to_beat(cls, value: float) -> float:
        if 0 < value < MIN_ENGINE_TIMEOUT_S:
            raise ValueError(f"at least {MIN_ENGINE_TIMEOUT_S:g} s, or 0")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_url(cls, value: str | None) -> str | None:
        if value is not None:
            check_url(value)
        return value

    @property
    def num_gateways(self) -> int:
        """Gateways to run: as set, or half of the cores that this process may use, 1 to 4."""
        return self.gateways or max(1, min(4, num_cores() // 2))

    @property
    def num_arenas(self) -> int:
        """Gateway processes of both kinds: those of HTTP, and that of gRPC."""
        return self.num_gateways + (self.grpc_port is not None)

    @property
    def num_connections(self) -> int:
        """Most connections of a gateway: as set, or what the limit of open files leaves. Probes are answered above it."""
        return min(self.max_connections, num_descriptors())

    @property
    def num_arena_bytes(self) -> int:
        """Bytes of all arenas: as set, or by the memory that this process may use."""
        return self.arena_bytes or default_arena_bytes(memory_bytes())

    @property
    def segment_bytes(self) -> int:
        """Bytes of the arena of each gateway."""
        return self.num_arena_bytes // self.num_arenas

    @property
    def busy_poll_s(self) -> float:
        """Seconds for `busy_poll_us`: as set, or what suits the cores."""
        if self.busy_poll_us >= 0:
            return self.busy_poll_us / 1e6
        # One more for the machine's other work. Without a GPU the engine computes on the cores that would poll.
        wanted = self.num_arenas + len(devices_of(self.device)) + 1
        return BUSY_POLL_S if num_cores() >= wanted and not self.device.startswith("cpu") else 0.0

    @property
    def limits(self) -> Limits:
        """Bounds on one request."""
        return Limits(max_rank=self.max_rank, max_elements=self.max_elements, max_result_bytes=self.max_result_bytes)

    @property
    def tls(self) -> TlsSettings | None:
        """The files of TLS, or None."""
        if self.tls_certificate is None:
            return None
        client_ca = None if self.tls_client_ca is None else str(self.tls_client_ca)
        return TlsSettings(str(self.tls_certificate), str(self.tls_key), client_ca)

    @property
    def tracing(self) -> TracingSettings | None:
        """Tracing settings, or None."""
        base = self.otlp_endpoint or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        return TracingSettings(base.rstrip("/") + "/v1/traces", self.trace_ratio) if base else None

    def gateway(
        self, index: int, inherited: Inherited, engine_addresses: list[str], grpc_address: str | None = None
    ) -> GatewaySettings:
        """The slice that gateway `index` gets."""
        return self._slice(
            GatewaySettings,
            index=index,
            inherited=inherited,
            engine_addresses=engine_addresses,
            grpc_address=grpc_address,
            segment_bytes=self.segment_bytes,
            max_connections=self.num_connections,
            keyless=keyless_of(self.keyless),
            is_read_only=self.read_only_tensors,
            allow_origin=origins_of(self.allow_origin),
        )

    def engine(
        self,
        index: int,
        listen_fd: int,
        vault_fd: int,
        board_fd: int,
        restarts: int,
        was_ready: bool,
        kept: Handover,
        files: tuple[OpenFile, ...] = (),
    ) -> EngineSettings:
        """The slice that engine `index` gets. One after an engine that `was_ready` does not try its kernels again."""
        return self._slice(
            EngineSettings,
            warmup="load" if was_ready and self.warmup == "run" else self.warmup,
            index=index,
            device=devices_of(self.device)[index],
            num_engines=len(devices_of(self.device)),
            listen_fd=listen_fd,
            vault_fd=vault_fd,
            board_fd=board_fd,
            restarts=restarts,
            kept=kept,
            files=files,
            shared_memory_prefix=self.shared_memory_prefix or "",
        )

    def _slice(self, kind: type[SliceT], **own: Any) -> SliceT:
        """Fills the settings of one process: what is not its own has the name that it has here; paths are text."""
        for name in kind.__struct_fields__:
            if name not in own:
                value = getattr(self, name)
                own[name] = str(value) if isinstance(value, Path) else value
        return kind(**own)

    @property
    def log(self) -> LogSettings:
        """Log settings."""
        return LogSettings(level=self.log_level, format=self.log_format)


def flag_name(name: str) -> str:
    """A setting's flag: `--max-body-bytes`."""
    return f"--{name.replace('_', '-')}"


def default_arena_bytes(memory: int) -> int:
    """Bytes of all arenas on a machine with so many bytes of memory."""
    return max(min(memory // 16, MAX_DEFAULT_ARENA_BYTES), min(MIN_DEFAULT_ARENA_BYTES, memory // 4))

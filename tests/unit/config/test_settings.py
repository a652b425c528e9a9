"""Settings: what is read from flags and the environment, and what is refused."""

from __future__ import annotations

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tilewire.service.config.machine import OWN_DESCRIPTORS, memory_bytes, num_cores
from tilewire.service.config.parsers import devices_of, keyless_of
from tilewire.service.config.process import Inherited, TracingSettings
from tilewire.service.config.settings import BUSY_POLL_S, Settings, default_arena_bytes
from tilewire.service.supervisor.handover import Handover


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("auto", ["auto"]),
        ("cpu", ["cpu"]),
        ("cuda", ["cuda:0"]),
        ("cuda:3", ["cuda:3"]),
        ("cuda:0,1", ["cuda:0", "cuda:1"]),
        ("cuda:2,0", ["cuda:2", "cuda:0"]),
    ],
)
def test_devices(device: str, names: list[str]) -> None:
    assert devices_of(device) == names


@pytest.mark.parametrize(
    "device", ["", "gpu", "cuda:x", "cuda:0,0", "cpu:0,00", "cuda:-1", "cuda:0,", "cpu:x", "cuda:1,,2"]
)
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        devices_of(device)
    with pytest.raises(ValidationError):
        Settings(device=device)


@pytest.mark.parametrize(("text", "nbytes"), [("1048576", 2**20), ("64MiB", 2**26), ("2GB", 2 * 10**9), (2**21, 2**21)])
def test_bytes_with_units(text: str | int, nbytes: int) -> None:
    assert Settings(arena_bytes=text).arena_bytes == nbytes


@given(st.integers(1, 256))
def test_gateways_share_the_arena(gateways: int) -> None:
    settings = Settings(gateways=gateways)
    assert settings.num_gateways == gateways
    assert settings.gateway(0, Inherited(3), []).segment_bytes * gateways <= settings.num_arena_bytes


def test_gateways_follow_the_cores_by_default() -> None:
    assert 1 <= Settings().num_gateways <= 4


def test_polling_needs_a_core_for_each_process_and_a_gpu() -> None:
    many = 10 * num_cores()
    assert Settings(gateways=many).busy_poll_s == 0
    assert Settings(device="cpu").busy_poll_s == 0
    assert Settings(busy_poll_us=0).busy_poll_s == 0
    asked = Settings(gateways=many, busy_poll_us=200)
    assert asked.busy_poll_s == 200e-6
    assert asked.gateway(0, Inherited(3), []).busy_poll_s == 200e-6
    has_enough = num_cores() >= 1 + 1 + 1
    assert Settings(gateways=1, device="cuda:0").busy_poll_s == (BUSY_POLL_S if has_enough else 0)


@pytest.mark.parametrize(
    ("files", "most"),
    [
        ({"cpu.max": "150000 100000"}, 1),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_a_containers_quota_counts(tmp_path: Path, files: dict[str, str], most: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_cores(tmp_path) == (most or len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"max_rank": 1},
        {"busy_poll_us": -2},
        {"log_level": "loud"},
        {"nonsense": 1},
        {"arena_bytes": "lots"},
        {"keyless": "health"},
        {"keyless": "docs,none"},
        {"trace_ratio": 1.5},
        {"allow_origin": "example.org"},
        {"allow_origin": "https://example.org/path"},
        {"allow_origin": "https://Example.org"},
        {"allow_origin": "https://"},
        {"allow_origin": "null"},
        {"allow_origin": "https://example.org:99999"},
        {"allow_origin": "https://example.org https://example.com"},
        {"tls_key": "key.pem"},
        {"kernels": "fastest", "online_tuning": False},
        {"kernels": "fastest", "batch_invariant": True},
        {"kernels": "slowest"},
        {"tls_client_ca": "ca.pem"},
        {"resident_bytes": "16EiB"},
        {"max_elements": 2**63},
        {"arena_bytes": "999999TiB"},
        {"engine_timeout_s": 1e-9},
        {"keep_alive_s": math.inf},
        {"otlp_endpoint": "collector:4318"},
        {"otlp_endpoint": "http://"},
        {"otlp_endpoint": "http://collector:99999"},
        {"otlp_endpoint": "http://collector:port"},
        {"otlp_endpoint": "http://collector one:4318"},
        {"otlp_endpoint": " http://collector:4318"},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict) -> None:
    with pytest.raises(ValidationError):
        Settings(**wrong)


def test_a_limit_of_addresses_is_one_of_memory() -> None:
    code = "from tilewire.service.config.machine import memory_bytes; print(memory_bytes())"
    command = ["prlimit", f"--as={2**30}", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert int(done.stdout) <= 2**30


@pytest.mark.parametrize(("given", "read"), [("[::1]", "::1"), ("[::]", "::"), ("::1", "::1"), ("[]", "[]")])
def test_an_address_may_have_the_brackets_of_a_url(given: str, read: str) -> None:
    settings = Settings(host=given, metrics_host=given)
    assert (settings.host, settings.metrics_host) == (read, read)


@pytest.mark.parametrize("name", ["host", "metrics_host", "store", "tensors_dir", "api_keys_file", "tls_key", "port"])
def test_an_empty_variable_is_neither_the_default_nor_the_working_folder(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"TILEWIRE_{name.upper()}", "")
    with pytest.raises(ValidationError, match="empty; leave it out"):
        Settings()


@pytest.mark.parametrize(
    ("flags", "is_tuned"),
    [({}, True), ({"online_tuning": False}, False), ({"batch_invariant": True}, False), ({"kernels": "fastest"}, True)],
)
def test_kernels_are_tuned_online_unless_bits_must_stay(flags: dict, is_tuned: bool) -> None:
    assert Settings(**flags).is_tuned_online == is_tuned


@pytest.mark.parametrize(
    ("text", "words"), [("none", ()), ("", ()), ("docs", ("docs",)), ("docs, metrics", ("docs", "metrics"))]
)
def test_what_needs_no_key(text: str, words: tuple[str, ...]) -> None:
    assert keyless_of(Settings(keyless=text).keyless) == words


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("", ()),
        ("*", ("*",)),
        ("https://a.example, http://localhost:8888", ("https://a.example", "http://localhost:8888")),
    ],
)
def test_origins_that_may_call(text: str, origins: tuple[str, ...]) -> None:
    assert Settings(allow_origin=text).gateway(0, Inherited(3), []).allow_origin == origins


def test_spans_go_where_the_flag_says_or_else_the_standard_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert Settings().tracing is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://standard:4318")
    assert Settings().tracing == TracingSettings("http://standard:4318/v1/traces", 1.0)
    flag = Settings(otlp_endpoint="http://flag:4318/", trace_ratio=0.25)
    assert flag.tracing == TracingSettings("http://flag:4318/v1/traces", 0.25)


@pytest.mark.parametrize(
    ("limit", "nbytes"),
    [("2147483648\n", 2**31), ("max\n", None), (str(2**62), None), ("", None)],
)
def test_memory_is_the_containers_limit_or_the_machines(tmp_path: Path, limit: str, nbytes: int | None) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_bytes(tmp_path) == machine
    (tmp_path / "memory.max").write_text(limit)
    assert memory_bytes(tmp_path) == (nbytes or machine)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(limit)
    assert memory_bytes(tmp_path) == (nbytes or machine)


def test_connections_are_bounded_by_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for open_files, connections in ((1024, 896), (200, 100), (hard, min(8192, hard - OWN_DESCRIPTORS))):
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, hard))
            assert Settings().num_connections == connections
            assert Settings(max_connections=50).num_connections == 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("memory", "arena"),
    [(2**30, 2**28), (2**33, 2**31), (2**35, 2**31), (2**36, 2**32), (2**38, 2**34), (2**40, 2**34)],
)
def test_the_arena_follows_the_memory(memory: int, arena: int) -> None:
    assert default_arena_bytes(memory) == arena


def test_the_arena_is_large_enough_or_chosen() -> None:
    assert Settings().num_arena_bytes == default_arena_bytes(memory_bytes())
    assert Settings(arena_bytes=2**20).num_arena_bytes == 2**20
    with pytest.raises(ValidationError, match="1048576"):
        Settings(arena_bytes=2**20 - 1)


def test_an_engine_after_one_that_was_ready_loads_its_kernels_without_trying_them() -> None:
    def warmup(settings: Settings, *, was_ready: bool) -> str:
        return settings.engine(0, 3, 4, 5, int(was_ready), was_ready, Handover()).warmup

    assert warmup(Settings(), was_ready=False) == "run"
    assert warmup(Settings(), was_ready=True) == "load"
    assert warmup(Settings(warmup="none"), was_ready=True) == "none"

"""`tilewire serve`: what is said of settings, variables and ports that cannot be, before anything is served."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import ValidationError

from tests.unit.client.scripted_server import closes, scripted
from tests.unit.client.speaking_server import SpeakingServer, on_a_socket
from tilewire.service.cli.serve import remedy_of, unknown_variables, words_of
from tilewire.service.config import preflight
from tilewire.service.config.machine import memory_bytes
from tilewire.service.config.settings import Settings
from tilewire.service.supervisor.listeners import StartError, bind

LOGGER: structlog.stdlib.BoundLogger = structlog.get_logger("test")


def words(given: dict[str, Any], environment: dict[str, str]) -> list[str]:
    values = {name.lower().removeprefix("tilewire_"): value for name, value in environment.items()}
    with pytest.raises(ValidationError) as raised:
        Settings(**{**values, **given})
    return [words_of(problem, given, environment) for problem in raised.value.errors()]


def test_a_variable_is_blamed_by_its_name() -> None:
    assert words({}, {"TILEWIRE_PORT": "abc"}) == ["TILEWIRE_PORT: 'abc' is no integer"]
    assert words({}, {"tilewire_port": "abc"}) == ["tilewire_port: 'abc' is no integer"]
    assert words({}, {"TILEWIRE_DEVICE": "gpu"}) == ["TILEWIRE_DEVICE: 'gpu' is not auto, cpu, cuda:0 or cuda:0,1"]


def test_a_flag_is_blamed_by_its_own() -> None:
    assert words({"port": "abc"}, {}) == ["--port: 'abc' is no integer"]
    assert words({"port": "abc"}, {"TILEWIRE_PORT": "1"}) == ["--port: 'abc' is no integer"]
    assert words({"device": "gpu"}, {}) == ["--device: 'gpu' is not auto, cpu, cuda:0 or cuda:0,1"]
    (together,) = words({"tls_key": "/dev/null"}, {})
    assert together == "--tls-certificate and --tls-key go together"


def test_unknown_variables_are_named_with_the_nearest() -> None:
    found = unknown_variables(
        {"TILEWIRE_PROT": "1", "TILEWIRE_PORT": "1", "TILEWIRE_URL": "x", "TILEWIRE_ZZZ": "", "PATH": ""}
    )
    assert found == [
        ("TILEWIRE_PROT", "did you mean TILEWIRE_PORT?"),
        ("TILEWIRE_ZZZ", "`tilewire serve --help` lists the settings"),
    ]


@pytest.mark.slow
def test_the_command_says_both() -> None:
    environment = {**os.environ, "TILEWIRE_PROT": "1", "TILEWIRE_API_KEYS_FILE": "/no/such/file"}
    command = [sys.executable, "-P", "-m", "tilewire", "serve", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert done.returncode == 2
    assert "did you mean TILEWIRE_PORT?" in done.stderr
    assert "TILEWIRE_API_KEYS_FILE: /no/such/file: No such file" in done.stderr
    environment = {**os.environ, "TILEWIRE_PORT": "abc"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "TILEWIRE_PORT: 'abc' is no integer\n")


def test_residents_beyond_the_memory_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    memory = memory_bytes()
    for resident_bytes, is_told in ((memory, True), (memory // 2, False)):
        preflight.check(Settings(arena_bytes=2**20, resident_bytes=resident_bytes), LOGGER)
        assert ("arena and residents may exceed the memory" in capsys.readouterr().out) == is_told


@pytest.mark.parametrize("name", ["tensors_dir", "programs_dir", "store"])
def test_a_folder_that_cannot_be_read_is_refused_at_once(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((tmp_path / "none", "No such file or directory"), (file, "Not a directory")):
        given: dict[str, Any] = {name: path}
        with pytest.raises(preflight.PreflightError, match=f"{path}: {reason}") as raised:
            preflight.check(Settings(**given), LOGGER)
        assert raised.value.setting == name


def test_a_folder_with_nothing_to_load_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(Settings(tensors_dir=tmp_path, programs_dir=tmp_path, store=tmp_path), LOGGER)
    told = capsys.readouterr().out.splitlines()
    assert ["*.safetensors" in told[0], "*.json" in told[1], len(told)] == [True, True, 2]
    (tmp_path / "w.safetensors").touch()
    (tmp_path / "p.json").touch()
    preflight.check(Settings(tensors_dir=tmp_path, programs_dir=tmp_path, store=tmp_path), LOGGER)
    assert not capsys.readouterr().out


def test_a_store_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    preflight.check(Settings(store=Path("/proc/self")), LOGGER)
    assert "the store cannot be written: changes will be 503" in capsys.readouterr().out


def test_a_setting_without_effect_is_told_with_the_one_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert preflight.without_effect(Settings()) == []
    alone = Settings(shared_memory_prefix="x", metrics_host="::1", trace_ratio=0.1, store_check_s=3)
    assert preflight.without_effect(alone) == [
        ("store_check_s", "store"),
        ("shared_memory_prefix", "allow_shared_memory"),
        ("metrics_host", "metrics_port"),
        ("trace_ratio", "otlp_endpoint"),
    ]
    assert preflight.without_effect(Settings(metrics_host="::1", metrics_port=0)) == []
    monkeypatch.setenv("TILEWIRE_KEYLESS", "none")
    assert preflight.without_effect(Settings()) == [("keyless", "api_keys_file")]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    assert preflight.without_effect(Settings(trace_ratio=0.1, keyless="docs", api_keys_file="x")) == []


def taken(port: int) -> StartError:
    with pytest.raises(StartError) as raised:
        bind("127.0.0.1", port)
    return raised.value


def test_a_port_that_a_tilewire_has() -> None:
    with on_a_socket(SpeakingServer()) as url:
        port = int(url.rpartition(":")[2])
        remedy = remedy_of(taken(port), Settings(port=port))
    assert remedy == f"; a Tilewire answers there already, at {url}: use it, or type --port 0 for a free port"


def test_a_port_that_something_else_has() -> None:
    with scripted(closes) as url:
        port = int(url.rpartition(":")[2])
        assert remedy_of(taken(port), Settings(port=port)) == "; another program has it: type --port 0 for a free port"


def test_another_port_that_something_else_has() -> None:
    with scripted(closes) as url:
        port = int(url.rpartition(":")[2])
        for settings, flag in (
            (Settings(metrics_port=port), "--metrics-port"),
            (Settings(grpc_port=port), "--grpc-port"),
        ):
            assert remedy_of(taken(port), settings) == f"; another program has it: choose another {flag}"


def test_two_ports_cannot_be_one() -> None:
    with pytest.raises(ValidationError, match="--grpc-port: 8000 is --port, too; choose another"):
        Settings(port=8000, grpc_port=8000)
    with pytest.raises(ValidationError, match="--grpc-port: 9000 is --metrics-port, too"):
        Settings(metrics_port=9000, grpc_port=9000)
    assert Settings(port=0, metrics_port=0).port == 0


@pytest.mark.parametrize("host", ["192.0.2.1", "no.such.host.invalid", "[::1]"])
def test_an_address_that_cannot_be_had_is_blamed_on_its_flags(host: str) -> None:
    with pytest.raises(StartError) as raised:
        bind(host, 1)
    assert remedy_of(raised.value, Settings(port=1)) == "; look at --host and --port"
    assert remedy_of(raised.value, Settings(grpc_port=1)) == "; look at --host and --grpc-port"
    assert remedy_of(raised.value, Settings(metrics_port=1)) == "; look at --metrics-host and --metrics-port"


def test_other_errors_have_no_remedy() -> None:
    assert remedy_of(StartError("engine-0 cannot start"), Settings()) == ""

"""The gRPC process in a running service: restarts, drain, TLS, quotas, traces, and what else depends on other processes."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from grpc_health.v1 import health_pb2
from tritonclient.utils import InferenceServerException

from tests.conftest import SMALL, StartServer
from tests.support.api_keys import entry, keys_file
from tests.support.collector import Collector, attributes_of
from tests.support.exposition import settles, total
from tests.support.grpc_calls import (
    TIMEOUT_S,
    ask,
    channel_to,
    infer,
    infer_with_call,
    out_of,
    refused,
    request_of,
    trailing,
)
from tests.support.live_server import COMMAND, LiveServer, held, serving
from tests.support.programs import free_port
from tests.support.shared_objects import shared_object
from tests.support.tensor_bodies import to_npy
from tests.support.tls_server import Certificates, make_certificates
from tilewire.service.gateway.grpc.paths import INFER, SERVICE
from tilewire.service.gateway.grpc.status import PUSHBACK, RETRY_AFTER

FLAGS = (*SMALL, "--gateways", "1", "--grpc-port", "0")
A = np.arange(6, dtype=np.float32).reshape(2, 3)
REQUEST = request_of("add", {"a": A, "b": A})
POLL_S = 0.02


def until_served(channel: grpc.Channel) -> None:
    end_s = time.monotonic() + 60
    while True:
        with contextlib.suppress(grpc.RpcError):
            if ask(channel, "ServerReady").ready:
                return
        assert time.monotonic() < end_s
        time.sleep(POLL_S)


@pytest.mark.slow
def test_a_killed_engine_is_unavailable_with_a_hint_and_comes_back(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    check = health_pb2.HealthCheckRequest(service=SERVICE).SerializeToString()
    with channel_to(server) as channel:
        np.testing.assert_array_equal(out_of(infer(channel, REQUEST)), 2 * A)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(check, timeout=TIMEOUT_S)
        statuses = (health_pb2.HealthCheckResponse.FromString(answer).status for answer in watch)
        assert next(statuses) == health_pb2.HealthCheckResponse.SERVING
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        assert next(statuses) == health_pb2.HealthCheckResponse.NOT_SERVING
        with refused(grpc.StatusCode.UNAVAILABLE, "starting or restarting") as errors:
            infer(channel, REQUEST)
        found = trailing(errors[0])
        assert (found[RETRY_AFTER], found[PUSHBACK]) == ("1", "1000")
        assert not ask(channel, "ModelReady", name="add").ready
        assert {one.state for one in ask(channel, "RepositoryIndex").models} == {"UNAVAILABLE"}
        assert not ask(channel, "RepositoryIndex", ready=True).models
        assert next(statuses) == health_pb2.HealthCheckResponse.SERVING
        np.testing.assert_array_equal(out_of(infer(channel, REQUEST)), 2 * A)


def test_limits_past_the_range_of_the_library_are_its_largest(start_server: StartServer) -> None:
    server = start_server(
        *FLAGS, "--arena-bytes", "16GiB", "--max-body-bytes", "4GiB", "--max-connections", "4294967296"
    )
    with channel_to(server) as channel:
        np.testing.assert_array_equal(out_of(infer(channel, REQUEST)), 2 * A)


@pytest.mark.slow
def test_requests_in_a_dying_engine_are_unavailable(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    (engine,) = server.engines()
    with channel_to(server) as channel:
        infer(channel, REQUEST)
        with held([engine]):
            waiting = channel.unary_unary(INFER).future(REQUEST.SerializeToString(), timeout=TIMEOUT_S)
            with server.client() as client:
                assert settles(client, lambda samples: total(samples, "tilewire_in_flight_requests") == 1)
            os.kill(engine, signal.SIGKILL)
        assert waiting.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(waiting.trailing_metadata())[PUSHBACK] == "1000"
        until_served(channel)
    for pid in server.gateways():
        server.wait_ready(pid)


@pytest.mark.slow
def test_a_killed_gateway_comes_back_on_its_port(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    with channel_to(server) as channel:
        infer(channel, REQUEST)
        victim = server.grpc_gateway()
        os.kill(victim, signal.SIGKILL)
        until_served(channel)
        np.testing.assert_array_equal(out_of(infer(channel, REQUEST)), 2 * A)
        assert server.grpc_gateway() != victim


@pytest.mark.slow
def test_sigterm_under_load_answers_what_was_accepted(start_server: StartServer) -> None:
    server = start_server(*FLAGS)
    is_ending = threading.Event()
    failures: list[object] = []

    def load() -> None:
        with channel_to(server) as channel:
            while True:
                try:
                    if not np.array_equal(out_of(infer(channel, REQUEST)), 2 * A):
                        failures.append("a wrong answer")
                except grpc.RpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE or not is_ending.is_set():
                        failures.append(error)
                    return

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    with server.client() as client:
        assert settles(client, lambda samples: total(samples, "tilewire_requests_total", op="add") > 50)
    is_ending.set()
    assert server.stop() == 0
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert not failures


@pytest.mark.slow
def test_an_idle_stream_does_not_hold_up_the_end(start_server: StartServer) -> None:
    server = start_server(*FLAGS)
    with channel_to(server) as channel:
        released = threading.Event()

        def messages() -> Iterator[bytes]:
            yield REQUEST.SerializeToString()
            released.wait(TIMEOUT_S)

        answers = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")(messages())
        next(answers)
        began_s = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began_s < 15
        released.set()
        with pytest.raises(grpc.RpcError):
            next(answers)


def test_residents_over_http_are_seen_at_once(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    request = request_of("add", {"a": A})
    request.inputs.add(name="b").parameters["resident"].string_param = "w"
    with channel_to(server) as channel, server.client() as client:
        for value in range(5):
            b = np.full((2, 3), value, np.float32)
            client.put("/v1/tensors/w", content=to_npy(b)).raise_for_status()
            np.testing.assert_array_equal(out_of(infer(channel, request)), A + value)


@pytest.fixture(scope="module")
def keyed(shared_server: StartServer, collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> LiveServer:
    """Requires API keys, and traces what its callers trace."""
    entries = (
        entry("none", "tw_none", "ops = []"),
        entry("slow", "tw_slow", 'ops = ["*"]\nrequests_per_s = 0.01'),
        entry("free", "tw_free", 'ops = ["*"]\nwrite = ["*"]'),
    )
    keys = keys_file(tmp_path_factory.mktemp("keys"), *entries)
    return shared_server(*FLAGS, "--api-keys-file", str(keys), "--otlp-endpoint", collector.url, "--trace-ratio", "0")


@pytest.mark.slow
def test_who_may_run_no_program_hears_of_none(keyed: LiveServer) -> None:
    steps = [{"op": "softmax", "inputs": {"x": "x"}, "as": "p"}]
    text = {"inputs": {"x": {"dtype": "float32", "shape": [2]}}, "steps": steps, "outputs": ["p"]}
    with keyed.client() as client, channel_to(keyed) as channel:
        headers = {"x-api-key": "tw_free"}
        client.put("/v1/programs/hidden", json=text, headers=headers).raise_for_status()
        for key, hears in (("tw_none", False), ("tw_free", True)):
            metadata = [("authorization", f"Bearer {key}")]
            index = ask(channel, "RepositoryIndex", metadata).models
            stats = ask(channel, "ModelStatistics", metadata).model_stats
            assert [("hidden" in {one.name for one in models}) for models in (index, stats)] == [hears, hears]
        for method in ("ModelMetadata", "ModelConfig", "ModelReady", "ModelStatistics"):
            with refused(grpc.StatusCode.PERMISSION_DENIED, "program"):
                ask(channel, method, [("authorization", "Bearer tw_none")], name="hidden")
        client.delete("/v1/programs/hidden", headers=headers).raise_for_status()


def test_quotas_count_both_doors(keyed: LiveServer) -> None:
    server = keyed
    metadata = [("authorization", "Bearer tw_slow")]
    with channel_to(server) as channel, server.client() as client:
        infer(channel, REQUEST, metadata)
        end_s = time.monotonic() + TIMEOUT_S
        while client.post("/v1/add", headers={"x-api-key": "tw_slow"}).status_code != 429:
            assert time.monotonic() < end_s
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "quota") as errors:
            infer(channel, REQUEST, metadata)
        assert int(trailing(errors[0])[RETRY_AFTER]) > 10


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return make_certificates(tmp_path)


def secure(server: LiveServer, certificates: Certificates, pair: bytes | None = None) -> grpc.Channel:
    credentials = grpc.ssl_channel_credentials(certificates.authority.read_bytes(), pair, pair)
    return grpc.secure_channel(server.grpc_address, credentials)


@pytest.mark.slow
def test_tls_by_the_same_flags(certificates: Certificates, tmp_path: Path) -> None:
    flags = (*FLAGS, *certificates.flags, "--tls-client-ca", str(certificates.authority))
    context = certificates.context(with_client=True)
    with serving(tmp_path / "log", *flags, tls=context) as server:
        pair = certificates.client.read_bytes()
        host, _, port = server.grpc_address.rpartition(":")
        with socket.create_connection((host, int(port)), TIMEOUT_S) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert plain.recv(1) == b""
        # Anybody would write to it.
        assert "andshake" not in server.log.read_text()
        with secure(server, certificates, pair) as channel:
            until_served(channel)
            np.testing.assert_array_equal(out_of(infer(channel, REQUEST)), 2 * A)
        with secure(server, certificates) as channel, refused(grpc.StatusCode.UNAVAILABLE, ""):
            infer(channel, REQUEST)
        with channel_to(server) as channel, refused(grpc.StatusCode.UNAVAILABLE, ""):
            infer(channel, REQUEST)


@pytest.mark.slow
def test_a_new_certificate_is_taken_up(certificates: Certificates, tmp_path: Path) -> None:
    with serving(tmp_path / "log", *FLAGS, *certificates.flags, tls=certificates.context()) as server:
        with secure(server, certificates) as channel:
            until_served(channel)
        (tmp_path / "next").mkdir()
        following = make_certificates(tmp_path / "next")
        for old, new in ((certificates.key, following.key), (certificates.certificate, following.certificate)):
            new.replace(old)
        with secure(server, following) as channel:
            until_served(channel)
        with secure(server, certificates) as channel, refused(grpc.StatusCode.UNAVAILABLE, ""):
            infer(channel, REQUEST)


@pytest.mark.slow
def test_a_certificate_that_the_library_lacks_is_said_so(certificates: Certificates, tmp_path: Path) -> None:
    """OpenSSL takes it, and so do the gateways of HTTP."""
    with serving(tmp_path / "log", *FLAGS, *certificates.flags, tls=certificates.context()) as server:
        with secure(server, certificates) as channel:
            until_served(channel)
        write_certificate_of_another_curve(certificates)
        end_s = time.monotonic() + TIMEOUT_S
        while "stays as it was" not in server.log.read_text():
            assert time.monotonic() < end_s
            # It is read again at a handshake.
            with secure(server, certificates) as channel:
                until_served(channel)
    line = f"the certificate stays as it was: {certificates.certificate}: gRPC serves no key of this kind"
    assert line in server.log.read_text()


def write_certificate_of_another_curve(certificates: Certificates) -> None:
    """Replaces key and certificate by those of a curve that Python's OpenSSL has and BoringSSL lacks."""
    key = ec.generate_private_key(ec.SECP256K1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    made = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now, now + dt.timedelta(days=1)
    )
    texts = {
        certificates.key: key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        certificates.certificate: made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
    }
    for path, text in texts.items():
        (path.parent / "next.pem").write_bytes(text)
        (path.parent / "next.pem").replace(path)


def test_a_request_is_traced(keyed: LiveServer, collector: Collector) -> None:
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    metadata = [("traceparent", f"00-{trace}-{parent}-01"), ("x-request-id", "traced")]
    with channel_to(keyed) as channel:
        infer_with_call(channel, REQUEST, [*metadata, ("authorization", "Bearer tw_free")])
        spans = collector.trace("traced")
    (whole,) = (span for span in spans if attributes_of(span).get("tilewire.request_id") == "traced")
    assert attributes_of(whole)["tilewire.op"] == "add"
    assert attributes_of(whole)["http.route"] == INFER
    assert whole.trace_id.hex() == trace


def refused_port(port: int) -> str:
    """Starts a service with that port for gRPC, which must fail; returns what it says."""
    command = [*COMMAND, "--port", "0", "--device", "cpu", "--grpc-port", str(port)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_is_said_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in refused_port(port)


@pytest.mark.slow
def test_two_services_do_not_share_a_port(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    host, _, port = server.grpc_address.rpartition(":")
    assert f"cannot listen on {host} port {port}" in refused_port(int(port))
    with channel_to(server) as channel:
        np.testing.assert_array_equal(out_of(infer(channel, REQUEST)), 2 * A)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
def test_all_interfaces_are_those_of_both_protocols(tmp_path: Path) -> None:
    """gRPC's library takes each of both addresses for all for both; docs/grpc.md says so."""
    port = free_port()
    flags = (*SMALL, "--gateways", "1", "--host", "0.0.0.0", "--grpc-port", str(port))
    with serving(tmp_path / "log", *flags) as server:
        with grpc.insecure_channel(f"[::1]:{port}") as channel:
            until_served(channel)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://[::1]:{server.port}/healthz", trust_env=False)


def test_http_reaches_nothing_at_the_grpc_port(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{server.grpc_address}/v2", trust_env=False, timeout=TIMEOUT_S)
    with channel_to(server) as channel:
        infer(channel, REQUEST)


@pytest.mark.slow
def test_without_the_flag_no_region_is_registered_or_named(shared_server: StartServer) -> None:
    server = shared_server(*FLAGS)
    x = triton.InferInput("x", list(A.shape), "FP32").set_shared_memory("r", A.nbytes)
    with triton.InferenceServerClient(server.grpc_address) as client, shared_object(4096) as path:
        with pytest.raises(InferenceServerException, match="--allow-shared-memory") as registering:
            client.register_system_shared_memory("r", path.name, 10)
        with pytest.raises(InferenceServerException, match="--allow-shared-memory") as inferring:
            client.infer("softmax", [x])
        assert {registering.value.status(), inferring.value.status()} == {"StatusCode.UNIMPLEMENTED"}
        assert "system_shared_memory" not in client.get_server_metadata().extensions
        # Load generators do this at the start of every run.
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        assert not client.get_system_shared_memory_status().regions

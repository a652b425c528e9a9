"""HTTPS as clients meet it: bodies of every size and kind, clients that leave, who may connect, certificates that change."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import os
import socket
import ssl
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
import pytest
import trustme

import tilewire
from tests.support.api_keys import keys_file
from tests.support.exposition import is_idle, settles, total
from tests.support.live_server import COMMAND, LiveServer, serving
from tests.support.raw_http import ConnectionEnded, RawConnection, head, post
from tests.support.tensor_bodies import to_npy
from tests.support.tls_server import Certificates, make_certificates

T = TypeVar("T")

FLAGS = ("--gateways", "2", "--arena-bytes", "512MiB", "--max-body-bytes", "64MiB", "--max-result-bytes", "64MiB")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def secure(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("secure") / "log"
    with serving(log, *FLAGS, *certificates.flags, tls=certificates.context()) as server:
        yield server


@pytest.fixture
def client(secure: LiveServer) -> Iterator[httpx.Client]:
    with secure.client() as client:
        yield client


def body_of(nbytes: int, seed: int = 0) -> tuple[bytes, np.ndarray]:
    """An npy body of about so many bytes, to be added to itself, and what comes of that."""
    array = np.random.default_rng(seed).integers(-1000, 1000, max(1, nbytes // 4), np.int32)
    return to_npy(array), array + array


@pytest.mark.slow
@pytest.mark.parametrize("nbytes", [4, 8 * 2**10, 100_000, 2**20 + 12, 32 * 2**20])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_come_and_go_whole(client: httpx.Client, nbytes: int, is_chunked: bool) -> None:
    body, doubled = body_of(nbytes)
    name = f"tls/{len(body)}"
    assert client.put(f"/v1/tensors/{name}", content=body).status_code in (200, 201)
    content = (body[at : at + 70_000] for at in range(0, len(body), 70_000)) if is_chunked else body
    response = client.post(f"/v1/add?b=@{name}", content=content)
    assert response.status_code == 200, response.text
    assert response.content == to_npy(doubled)


@pytest.mark.parametrize("split", [1, 100, 5000, 300_000])
def test_a_body_may_come_with_its_head_and_the_next_request_behind_it(secure: LiveServer, split: int) -> None:
    body, doubled = body_of(2**20)
    with RawConnection(secure.connect()) as raw:
        raw.send(head("PUT", "/v1/tensors/tls/split", content_length=str(len(body))), body)
        assert raw.answer().status in (200, 201)
        whole = post("/v1/add?b=@tls/split", body)
        raw.send(whole[:split], whole[split:] + head("GET", "/healthz"))
        assert raw.answer().body == to_npy(doubled)
        assert raw.answer().json() == {"live": True}
        # One byte a write, for a while: as many TLS records.
        small, doubled = body_of(200)
        raw.send(head("PUT", "/v1/tensors/tls/small", content_length=str(len(small))), small)
        assert raw.answer().status in (200, 201)
        request = post("/v1/add?b=@tls/small", small)
        raw.send(*(request[at : at + 1] for at in range(len(request))))
        assert raw.answer().body == to_npy(doubled)


def test_many_at_once_get_their_own(secure: LiveServer) -> None:
    def work(seed: int) -> bool:
        body, doubled = body_of(3 * 2**20, seed)
        with secure.client() as client:
            name = f"tls/mine-{seed}"
            client.put(f"/v1/tensors/{name}", content=body).raise_for_status()
            return all(client.post(f"/v1/add?b=@{name}", content=body).content == to_npy(doubled) for _ in range(4))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.slow
def test_a_client_that_reads_late_gets_all_of_it(secure: LiveServer, client: httpx.Client) -> None:
    body, doubled = body_of(24 * 2**20)
    client.put("/v1/tensors/tls/late", content=body).raise_for_status()
    with RawConnection(secure.connect()) as raw:
        raw.send(post("/v1/add?b=@tls/late", body))
        wait_until_full(raw.sock)
        assert raw.answer().body == to_npy(doubled)


def wait_until_full(sock: socket.socket) -> None:
    """Returns when the receive buffer holds bytes and takes no more: the server waits for this client."""
    end_s, unchanged, before = time.monotonic() + 20, 0, 0
    while unchanged < 10:
        assert time.monotonic() < end_s
        (waiting,) = struct.unpack("i", fcntl.ioctl(sock, termios.FIONREAD, bytes(4)))
        unchanged = unchanged + 1 if waiting == before and waiting else 0
        before = waiting
        time.sleep(0.02)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("nbytes", [200, 2**20])
def test_a_client_that_ends_its_side_is_still_answered(
    secure: LiveServer, certificates: Certificates, nbytes: int, version: ssl.TLSVersion
) -> None:
    body, doubled = body_of(nbytes)
    with secure.client() as client:
        client.put("/v1/tensors/tls/ended", content=body).raise_for_status()
    context = certificates.context()
    context.maximum_version = version
    with socket.create_connection((secure.host, secure.port), timeout=20) as sock:
        tls = BareTls(sock, context, secure.host)
        tls.send(post("/v1/add?b=@tls/ended", body))
        tls.end()
        answer = tls.read_all()
    assert answer.startswith(b"HTTP/1.1 ")
    assert answer.endswith(b"\r\n\r\n" + to_npy(doubled))


def test_requests_before_the_end_of_a_connection_are_all_answered(secure: LiveServer) -> None:
    """Those behind the first are decrypted, but not read, when the end comes."""
    body, doubled = body_of(160_000)
    with secure.client() as client:
        client.put("/v1/tensors/tls/piped", content=body).raise_for_status()
    sock = secure.connect()
    plain = socket.socket(fileno=os.dup(sock.fileno()))
    with plain, RawConnection(sock) as raw:
        raw.send(3 * post("/v1/add?b=@tls/piped", body))
        plain.shutdown(socket.SHUT_WR)
        bodies: list[bytes] = []
        while len(bodies) < 3:
            answer = raw.answer()
            # An interim response sees whether the client is there.
            bodies += [answer.body] if answer.status != 100 else []
    assert bodies == [to_npy(doubled)] * 3


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_ends_its_side_within_a_body_is_answered_400(
    secure: LiveServer, certificates: Certificates, version: ssl.TLSVersion
) -> None:
    context = certificates.context()
    context.maximum_version = version
    with socket.create_connection((secure.host, secure.port), timeout=20) as sock:
        tls = BareTls(sock, context, secure.host)
        tls.send(post("/v1/add", body_of(1000)[0])[:-10])
        tls.end()
        assert tls.read_all().startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("ahead", [0, 2**16, 2**19])
def test_a_client_that_sends_on_after_a_refusal_gets_it(
    secure: LiveServer, certificates: Certificates, version: ssl.TLSVersion, ahead: int
) -> None:
    context = certificates.context()
    context.maximum_version = version
    for _ in range(4):
        sock = socket.create_connection((secure.host, secure.port), timeout=20)
        with RawConnection(context.wrap_socket(sock, server_hostname=secure.host)) as raw:
            raw.send(head("PUT", "/v1/tensors/x", content_length=str(2**30)) + bytes(ahead))
            raw.send(*[bytes(2**14)] * 500)
            assert raw.answer().status == 413


class BareTls:
    """TLS of a client that ends its side and reads on, which no socket of Python's does.

    Args:
        sock: Connected socket.
        context: Whom it trusts.
        host: Name of the server.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        self._sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._driven(self._tls.do_handshake)

    def _driven(self, step: Callable[[], T]) -> T:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                self._sock.sendall(self._outgoing.read())
                self._incoming.write(self._sock.recv(2**16))
            finally:
                self._sock.sendall(self._outgoing.read())

    def send(self, data: bytes) -> None:
        self._tls.write(data)
        self._sock.sendall(self._outgoing.read())

    def end(self) -> None:
        with pytest.raises(ssl.SSLWantReadError):
            self._tls.unwrap()
        self._sock.sendall(self._outgoing.read())

    def read_all(self) -> bytes:
        """Everything up to the server's own end."""
        pieces = []
        with contextlib.suppress(ssl.SSLZeroReturnError):
            while True:
                pieces.append(self._driven(lambda: self._tls.read(2**20)))
        return b"".join(pieces)


@pytest.mark.parametrize("sent", [0, 1000, 2**20, 9 * 2**20])
@pytest.mark.parametrize("how", ["closes", "resets", "says goodbye"])
def test_clients_that_leave_cost_nothing(secure: LiveServer, client: httpx.Client, sent: int, how: str) -> None:
    body, _ = body_of(8 * 2**20)
    client.put("/v1/tensors/tls/left", content=body).raise_for_status()
    request = post("/v1/add?b=@tls/left", body)
    sock = secure.connect()
    assert isinstance(sock, ssl.SSLSocket)
    sock.sendall(request[: len(request) if sent > len(request) else sent or 40])
    if how == "says goodbye":
        with contextlib.suppress(OSError):
            sock.settimeout(1)
            sock.unwrap()
    if how == "resets":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1, 0, 0, 0, 0, 0, 0, 0]))
    sock.close()
    assert settles(client, is_idle)


def test_what_is_no_request_is_answered_and_closed(secure: LiveServer) -> None:
    with RawConnection(secure.connect()) as raw:
        raw.send(b"NONSENSE\r\n\r\n")
        assert raw.answer().status == 400
        assert raw.is_closed()


def test_plain_http_gets_no_answer(secure: LiveServer) -> None:
    with RawConnection(socket.create_connection((secure.host, secure.port), timeout=10)) as raw:
        raw.send(head("GET", "/healthz"))
        with pytest.raises((ConnectionEnded, AssertionError, ConnectionResetError)):
            raw.answer()


def test_the_client_says_how_it_trusts_an_authority(
    secure: LiveServer, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with tilewire.Client(secure.url, max_retries=0) as client, pytest.raises(tilewire.ConnectionFailed) as raised:
        client.tensors()
    assert raised.value.detail.endswith("set SSL_CERT_FILE to the file of its certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    with tilewire.Client(secure.url, max_retries=0) as client:
        assert client.ready()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_old_versions_are_refused(secure: LiveServer, certificates: Certificates) -> None:
    context = certificates.context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection((secure.host, secure.port), timeout=10) as plain, pytest.raises(ssl.SSLError):
        context.wrap_socket(plain, server_hostname=secure.host)
    context = certificates.context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with (
        socket.create_connection((secure.host, secure.port), timeout=10) as plain,
        context.wrap_socket(plain, server_hostname=secure.host) as sock,
    ):
        assert sock.version() == "TLSv1.2"


@pytest.fixture(scope="module")
def mutual(certificates: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Requires a client's certificate and an API key; its metrics are apart."""
    folder = tmp_path_factory.mktemp("mutual")
    flags = ("--gateways", "2", "--arena-bytes", "16MiB", "--tls-client-ca", str(certificates.authority))
    apart = ("--metrics-port", "0", "--api-keys-file", str(keys_file(folder)))
    tls = certificates.context(with_client=True)
    with serving(folder / "log", *flags, *apart, *certificates.flags, tls=tls) as server:
        yield server


@pytest.mark.slow
def test_clients_without_a_certificate_stay_outside(mutual: LiveServer, certificates: Certificates) -> None:
    with mutual.client() as known:
        assert known.get("/readyz").status_code == 200
    with (
        httpx.Client(base_url=mutual.url, trust_env=False, verify=certificates.context()) as unknown,
        pytest.raises(httpx.TransportError),
    ):
        unknown.get("/readyz")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_mutual"), [(trustme.KeyType.ECDSA, False), (trustme.KeyType.RSA, True)])
def test_a_new_certificate_is_taken_up(tmp_path: Path, kind: trustme.KeyType, is_mutual: bool) -> None:
    before = make_certificates(tmp_path)
    flags = (*before.flags, "--tls-client-ca", str(before.authority)) if is_mutual else before.flags
    with serving(tmp_path / "log", *FLAGS[:4], *flags, tls=before.context(with_client=is_mutual)) as server:
        # The old authority goes with the old files, so what is trusted says what is shown.
        after = make_certificates(tmp_path, kind)
        server.tls = after.context(with_client=is_mutual)
        end_s = time.monotonic() + 30
        for gateway in server.gateways():
            while True:
                try:
                    server.wait_ready(gateway)
                    break
                except ssl.SSLCertVerificationError:
                    assert time.monotonic() < end_s
                    time.sleep(0.1)
        after.key.write_text("nonsense")
        while "the certificate stays as it was" not in server.log.read_text():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        with server.client() as client:
            assert client.get("/readyz").status_code == 200
            assert settles(client, lambda now: total(now, "tilewire_reload_failed", file="certificate") == 1)
            make_certificates(tmp_path, kind)
            assert settles(client, lambda now: total(now, "tilewire_reload_failed", file="certificate") == 0)


@pytest.mark.slow
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_no_session_outlives_its_authority(tmp_path: Path, version: ssl.TLSVersion) -> None:
    before = make_certificates(tmp_path)
    context = before.context(with_client=True)
    context.maximum_version = version
    flags = ("--gateways", "1", "--arena-bytes", "16MiB", *before.flags, "--tls-client-ca", str(before.authority))
    with serving(tmp_path / "log", *flags, tls=context) as server:
        session, _ = session_after(server, context)
        session, is_resumed = session_after(server, context, session)
        assert is_resumed
        after = make_certificates(tmp_path)
        end_s = time.monotonic() + 30
        while "the certificate was read again" not in server.log.read_text():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        # The client trusts the new server; its own certificate is of the old authority.
        context.load_verify_locations(after.authority)
        with pytest.raises((OSError, ConnectionEnded)):
            session_after(server, context, session)
        known = after.context(with_client=True)
        session, is_resumed = session_after(server, known)
        assert not is_resumed
        assert session_after(server, known, session)[1]


def session_after(
    server: LiveServer, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLSession | None, bool | None]:
    """Asks on a new connection; returns its session, and whether that is the one that was offered."""
    plain = socket.create_connection((server.host, server.port), timeout=10)
    with (
        plain,
        context.wrap_socket(plain, server_hostname=server.host, session=session) as sock,
        RawConnection(sock) as raw,
    ):
        raw.send(head("GET", "/readyz"))
        assert raw.answer().status == 200
        return sock.session, sock.session_reused


SERVED = ("--tls-certificate", "{certificate}", "--tls-key", "{key}")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tls-certificate", "{certificate}"), "--tls-key"),
        (("--tls-certificate", "{key}", "--tls-key", "{key}"), "--tls-certificate"),
        (("--tls-certificate", "{certificate}", "--tls-key", "{missing}"), "--tls-key: {missing}: No such file"),
        (("--tls-client-ca", "{authority}"), "--tls-client-ca"),
        ((*SERVED, "--tls-client-ca", "{missing}"), "--tls-client-ca: {missing}: No such file"),
        ((*SERVED, "--tls-client-ca", "{key}"), "--tls-client-ca: {key}: "),
        (("--tls-certificate", "{pipe}", "--tls-key", "{key}"), "--tls-certificate: {pipe}: not a regular file"),
        ((*SERVED, "--tls-client-ca", "{pipe}"), "--tls-client-ca: {pipe}: not a regular file"),
    ],
)
def test_files_that_do_not_fit_are_refused_at_the_start(
    certificates: Certificates, tmp_path: Path, flags: tuple[str, ...], named: str
) -> None:
    paths = {**vars(certificates), "missing": tmp_path / "none.pem", "pipe": tmp_path / "pipe"}
    os.mkfifo(tmp_path / "pipe")
    command = [*COMMAND, "--port", "0", *(flag.format(**paths) for flag in flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert named.format(**paths) in done.stderr


@pytest.mark.slow
def test_connections_that_never_begin_tls_leave_descriptors_to_probes(
    certificates: Certificates, tmp_path: Path
) -> None:
    """Above the limit they have a moment for the handshake; below it, longer than this test waits for its answer."""
    flags = ("--gateways", "1", "--arena-bytes", "16MiB", "--max-connections", "10", "--body-timeout-s", "300")
    context, before = certificates.context(), ("prlimit", "--nofile=100:100")
    with (
        serving(tmp_path / "log", *flags, *certificates.flags, tls=context, before=before) as server,
        contextlib.ExitStack() as stack,
    ):
        for _ in range(100):
            stack.enter_context(socket.create_connection((server.host, server.port)))
        with server.client() as client:
            assert client.get("/healthz").status_code == 200


def test_metrics_apart_are_plain_and_open(mutual: LiveServer) -> None:
    announced = next(line for line in mutual.log.read_text().splitlines() if "metrics are served apart" in line)
    url = "http://" + announced.partition("http://")[2].split("/metrics")[0]
    with httpx.Client(base_url=url, trust_env=False) as apart, mutual.client() as public:
        assert apart.get("/readyz").status_code == 200
        assert apart.get("/healthz").status_code == 200
        assert "tilewire_engine_up" in apart.get("/metrics").text
        assert apart.post("/v1/matmul", content=b"").status_code == 404
        assert apart.get("/v1/tensors").status_code == 404
        assert public.get("/readyz").status_code == 200
        assert public.get("/metrics").status_code == 401


@pytest.mark.parametrize("framing", [{"content_length": "18000000"}, {"transfer_encoding": "chunked"}])
def test_clients_that_leave_in_the_middle_of_a_body_write_nothing_to_the_log(
    secure: LiveServer, framing: dict[str, str]
) -> None:
    """Anybody could fill it. They say good-bye, which is where TLS differs: the connection is there for a moment longer."""
    before = secure.log.read_text()
    body = b"x" * 9_000_000 if "content_length" in framing else b"ffffff\r\n" + b"x" * 5000
    for _ in range(20):
        with RawConnection(secure.connect()) as connection:
            connection.send(head("PUT", "/v1/tensors/left", **framing) + body)
            assert isinstance(connection.sock, ssl.SSLSocket)
            connection.sock.settimeout(1)
            with contextlib.suppress(OSError):
                connection.sock.unwrap()
    with secure.client() as client:
        assert settles(client, is_idle)
    assert secure.log.read_text()[len(before) :] == ""

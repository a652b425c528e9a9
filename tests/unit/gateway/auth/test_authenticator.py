"""Who may do what: keys, paths that need none, rights over ops and tensors, and the reload of the file."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.api_keys import entry, keys_file
from tilewire.service.config.parsers import KEYLESS
from tilewire.service.errors import Forbidden, Unauthorized
from tilewire.service.gateway.auth import authenticator as auth
from tilewire.service.gateway.auth.authenticator import KEYLESS_PATHS, Access, Authenticator, authorise
from tilewire.service.keys import digest_of

KEY, OTHER = "tw_one", "tw_other"


@pytest.fixture
def authenticator(tmp_path: Path) -> Authenticator:
    return Authenticator(keys_file(tmp_path, entry("one", KEY)), keyless=["docs"])


def test_without_a_file_everyone_may_do_everything() -> None:
    access = Authenticator().identify("/v1/matmul", {})
    authorise(access, op="matmul", read=["a"], write=["b"], shared_memory=True)
    assert access.name is None


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer  {KEY} "},
        {"x-api-key": KEY},
        {"authorization": "Basic b25lOnR3bw==", "x-api-key": KEY},
    ],
)
def test_a_key_is_taken_from_either_header(authenticator: Authenticator, headers: dict[str, str]) -> None:
    assert authenticator.identify("/v1/matmul", headers).name == "one"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer "},
        {"authorization": KEY},
        {"authorization": f"Bearer {OTHER}"},
        {"authorization": f"Bearer {OTHER}", "x-api-key": KEY},
        {"x-api-key": ""},
        {"x-api-key": KEY + "x"},
        {"x-api-key": digest_of(KEY)},
        {"x-api-key": "é"},
    ],
)
def test_anything_else_is_refused(authenticator: Authenticator, headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        authenticator.identify("/v1/matmul", headers)


def test_probes_need_no_key_and_may_do_nothing(authenticator: Authenticator) -> None:
    for path in ("/healthz", "/readyz", "/v2/health/live", "/v2/health/ready", "/docs", "/openapi.json"):
        access = authenticator.identify(path, {})
        with pytest.raises(Forbidden):
            authorise(access, op="matmul")
        with pytest.raises(Forbidden):
            authorise(access, read=["a"])


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/", "//healthz", "/healthz/", "/HEALTHZ", "/v2/health/", "/docs/", "/docs/../v1/matmul", "", "/v2"],
)
def test_other_spellings_and_other_paths_need_one(authenticator: Authenticator, path: str) -> None:
    with pytest.raises(Unauthorized):
        authenticator.identify(path, {})


def test_every_word_of_the_setting_opens_something() -> None:
    assert set(KEYLESS) == set(KEYLESS_PATHS)


def test_rights_are_names_and_prefixes() -> None:
    access = Access(ops=("matmul",), read=("weights/*", "bias"), write=("scratch/me/*",), shared_memory=False)
    authorise(access, op="matmul", read=["weights/w1", "weights/", "bias"], write=["scratch/me/x"])
    for wrong in (
        {"op": "softmax"},
        {"read": ["weights"]},
        {"read": ["bias2"]},
        {"read": ["weights/w1", "secret"]},
        {"write": ["weights/w1"]},
        {"write": ["scratch/mean"]},
        {"shared_memory": True},
    ):
        with pytest.raises(Forbidden):
            authorise(access, **wrong)


@given(st.text("ab/*", max_size=6), st.text("ab/", min_size=1, max_size=6))
def test_a_pattern_matches_itself_or_what_begins_with_it(pattern: str, name: str) -> None:
    expected = name == pattern or (pattern.endswith("*") and name.startswith(pattern[:-1]))
    assert Access(read=(pattern,)).may_read(name) == expected


def test_read_only_beats_what_a_key_grants(tmp_path: Path) -> None:
    granted = entry("one", KEY, 'write = ["*"]\nread = ["*"]\nshared_memory = true')
    for authenticator in (
        Authenticator(is_read_only=True),
        Authenticator(keys_file(tmp_path, granted), is_read_only=True),
    ):
        access = authenticator.identify("/v1/tensors/a", {"x-api-key": KEY})
        authorise(access, read=["a"])
        with pytest.raises(Forbidden):
            authorise(access, write=["a"])
        with pytest.raises(Forbidden):
            authorise(access, shared_memory=True)


def test_the_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = keys_file(tmp_path, entry("one", KEY))
    reports: list[bool] = []
    authenticator = Authenticator(path, report=reports.append)

    def knows(key: str) -> bool:
        try:
            authenticator.identify("/", {"x-api-key": key})
        except Unauthorized:
            return False
        return True

    async def until(*, one: bool, other: bool) -> None:
        end_s = time.monotonic() + 20
        while (knows(KEY), knows(OTHER)) != (one, other):
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)

    async def until_complained(times: int) -> None:
        end_s = time.monotonic() + 20
        while caplog.text.count("the API keys stay as they were") < times:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)

    async def run() -> None:
        watching = asyncio.create_task(authenticator.keep_current(reload_s=auth.LOOK_S))
        keys_file(tmp_path, entry("one", KEY), entry("other", OTHER))
        await until(one=True, other=True)
        keys_file(tmp_path, entry("other", OTHER))
        await until(one=False, other=True)
        keys_file(tmp_path, "nonsense")
        await until_complained(1)
        assert (knows(KEY), knows(OTHER)) == (False, True)
        path.unlink()
        await until_complained(2)
        assert knows(OTHER)
        assert reports == [True, True, True, False, False]
        # As the message says: the right to write is taken away, and nothing else of the file changes.
        keys_file(tmp_path, entry("one", KEY)).chmod(0o666)
        await until_complained(3)
        path.chmod(0o600)
        await until(one=True, other=False)
        keys_file(tmp_path)
        await until(one=False, other=False)
        assert reports[5:] == [False, True, True]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())


def test_the_loop_does_not_wait_until_the_file_is_read(tmp_path: Path) -> None:
    readers: list[int] = []
    authenticator = Authenticator(
        keys_file(tmp_path, entry("one", KEY)), report=lambda _is_current: readers.append(threading.get_ident())
    )

    async def run() -> None:
        watching = asyncio.create_task(authenticator.keep_current(reload_s=auth.LOOK_S))
        keys_file(tmp_path, entry("other", OTHER))
        end_s = time.monotonic() + 20
        while authenticator.keys_version == 2:
            assert time.monotonic() < end_s
            await asyncio.sleep(0.02)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(run())
    loop_thread = threading.get_ident()
    assert [one == loop_thread for one in readers] == [True, False]

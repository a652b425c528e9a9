"""`tilewire.dask`: blocks of dask arrays on three services equal NumPy's, also when one of them is lost in between."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import dask
import dask.array as da
import ml_dtypes
import numpy as np
import pytest
from dask.callbacks import Callback

import tilewire.dask as td
from tests.support.programs import free_port
from tests.support.replica import Replica
from tilewire import BadRequest, ConnectionFailed

# Several services.
pytestmark = pytest.mark.slow

FLAGS = ("--gateways", "1", "--arena-bytes", "128MiB", "--max-body-bytes", "32MiB", "--max-result-bytes", "32MiB")
NUM_SERVICES = 3


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replica]]:
    fleet: list[Replica] = []
    try:
        while len(fleet) < NUM_SERVICES:
            fleet.append(Replica(tmp_path_factory.mktemp("service"), free_port(), *FLAGS))
        yield fleet
    finally:
        statuses = [one.server.stop() for one in fleet]
    assert statuses == [0] * NUM_SERVICES


@pytest.fixture
def services(fleet: list[Replica]) -> td.Services:
    return td.Services([one.server.url for one in fleet])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    with dask.config.set(scheduler="threads", num_workers=4):
        yield
    td.close()


def integers(shape: tuple[int, ...], seed: int, dtype: Any = np.float32) -> np.ndarray:
    """Small integers: sums of products are exact in any order."""
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def residents(fleet: list[Replica]) -> list[str]:
    found = []
    for one in fleet:
        with one.server.client() as client:
            found += [entry["name"] for entry in client.get("/v1/tensors").json()]
    return found


class After(Callback):
    """Calls a function once, after so many products."""

    def __init__(self, count: int, call: Any) -> None:
        super().__init__(posttask=self._after)
        self._left = count
        self._call = call

    def _after(self, key: Any, *_rest: Any) -> None:
        if str(key).startswith("_product"):
            self._left -= 1
            if self._left == 0:
                self._call()


@pytest.mark.parametrize(
    ("size", "block"), [(600, 200), pytest.param(6_000, 1_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_product_with_a_service_lost_in_between(
    fleet: list[Replica], services: td.Services, size: int, block: int
) -> None:
    a, b = integers((size, size), 1), integers((size, size), 2)
    product = td.matmul(da.from_array(a, chunks=block), da.from_array(b, chunks=block), services)
    assert product.chunks == ((block,) * (size // block),) * 2
    blocks = (size // block) ** 2
    victim = fleet[0]
    with After(blocks // 3, victim.kill):
        result = product.compute(optimize_graph=False)
    try:
        assert victim.server.process.poll() is not None
        expected = a @ b
        for row in range(0, size, block):
            for column in range(0, size, block):
                part = np.s_[row : row + block, column : column + block]
                assert np.array_equal(result[part], expected[part]), (row, column)
    finally:
        victim.start()


def test_blocks_are_uploaded_once_each_to_its_home(fleet: list[Replica], services: td.Services) -> None:
    before = set(residents(fleet))
    a, b = integers((300, 200), 3), integers((200, 400), 4)
    product = td.matmul(da.from_array(a, chunks=(50, 100)), da.from_array(b, chunks=100), services)
    for _ in range(2):
        assert np.array_equal(product.compute(), a @ b)
    names = [name for name in residents(fleet) if name not in before]
    blocks = [
        td.Block.of(b[row : row + 100, column : column + 100]) for row in (0, 100) for column in range(0, 400, 100)
    ]
    assert sorted(names) == sorted(block.name for block in blocks)
    for block in blocks:
        home = services.in_order(block.name)[0]
        (holder,) = [one for one in fleet if one.server.url == home]
        assert block.name in residents([holder])


@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (np.float16, np.float16),
        (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        (np.int8, np.int32),
        (np.float32, np.float32),
    ],
)
def test_dtypes_of_a_product(services: td.Services, dtype: Any, result: Any) -> None:
    a, b = integers((64, 96), 5, dtype), integers((96, 32), 6, dtype)
    # Blocks of different sizes, and rows of b that are cut elsewhere than columns of a.
    out = td.matmul(da.from_array(a, chunks=(40, 36)), da.from_array(b, chunks=(50, 20)), services)
    assert out.dtype == result
    assert np.array_equal(out.compute(), (a.astype(np.int64) @ b.astype(np.int64)).astype(result))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("log", [False, True])
def test_softmax(services: td.Services, axis: int, log: bool) -> None:
    x = np.random.default_rng(7).normal(size=(60, 90)).astype(np.float32)
    out = td.softmax(da.from_array(x, chunks=(20, 45)), services, axis=axis, log=log).compute()
    shifted = x - x.max(axis=axis, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    np.testing.assert_allclose(out, logs if log else np.exp(logs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "chunks", "axis"), [((60, 90), (20, 45), 1), ((60, 90), 30, 0), ((4, 50, 6), 2, 1), ((70,), 32, 0)]
)
def test_sums_and_means(services: td.Services, shape: tuple[int, ...], chunks: Any, axis: int) -> None:
    x = integers(shape, 8)
    blocks = da.from_array(x, chunks=chunks)
    assert np.array_equal(td.total(blocks, services, axis=axis).compute(), x.sum(axis=axis))
    np.testing.assert_allclose(td.mean(blocks, services, axis=axis).compute(), x.mean(axis=axis), rtol=1e-6)


def test_services_are_the_same_on_another_worker(services: td.Services) -> None:
    copied = pickle.loads(pickle.dumps(services))
    assert copied == services
    assert hash(copied) == hash(services)
    assert copied.in_order("key") == services.in_order("key")


def test_keys_spread_over_services() -> None:
    services = td.Services([f"http://host-{number}:8000" for number in range(4)])
    homes = [services.in_order(f"block-{number}")[0] for number in range(400)]
    assert min(homes.count(url) for url in services.urls) > 50
    # One that is taken away leaves the others' homes as they were.
    fewer = td.Services(services.urls[1:])
    for number, home in enumerate(homes):
        if home != services.urls[0]:
            assert fewer.in_order(f"block-{number}")[0] == home


def test_blocks_of_equal_content_share_a_name() -> None:
    block = integers((3, 4), 9)
    assert td.Block.of(block).name == td.Block.of(np.asfortranarray(block)).name
    others = [block.T, block.astype(np.float16), block + 1, block.reshape(4, 3)]
    assert len({td.Block.of(other).name for other in (block, *others)}) == 5


def test_no_service_answers() -> None:
    services = td.Services([f"http://127.0.0.1:{free_port()}"], timeout_s=0.3)
    with pytest.raises(ConnectionFailed):
        td.softmax(da.ones((4, 4), dtype=np.float32), services).compute()


def test_a_refused_block_is_not_tried_elsewhere(services: td.Services) -> None:
    ones = da.ones((4, 4), dtype=np.float32)
    with pytest.raises(BadRequest, match="precision"):
        td.matmul(ones, ones, services, precision="exact").compute()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda ones, services: td.matmul(ones((4, 3)), ones((4, 3)), services), "b: has 4 rows"),
        (lambda ones, services: td.matmul(ones((4, 3)), ones((3, 3)).astype("f2"), services), "b: has dtype float16"),
        (lambda ones, services: td.matmul(ones((4,)), ones((4, 3)), services), "a: has rank 1"),
        (lambda ones, services: td.softmax(ones((4, 3)), services, axis=2), "axis: 2"),
        (lambda ones, services: td.total(ones((4, 3))[ones(4) > 0], services), "blocks of unknown size"),
        (lambda ones, services: td.Services([]), "urls"),
        (lambda ones, services: td.Services("http://host:8000"), "urls"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_sent(call: Any, words: str) -> None:
    def ones(shape: Any) -> Any:
        return da.ones(shape, dtype=np.float32)

    services = td.Services([f"http://127.0.0.1:{free_port()}"])
    with pytest.raises(ValueError, match=words):
        call(ones, services)

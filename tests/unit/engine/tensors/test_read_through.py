"""Residents beside the folder of `--store`, in one engine's loop: what is written first, loaded once, and never resurrected."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.local_totals import LocalTotals
from tests.support.mappings import MappedAtOnce
from tests.support.resident_chain import follow
from tests.support.transfers import MovedAtOnce
from tilewire.service.engine.backends.cpu import CpuBackend
from tilewire.service.engine.loop.jobs import Client
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.folder import StoreFolder
from tilewire.service.engine.tensors.read_through import ReadThrough
from tilewire.service.engine.tensors.resident import make_copy
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.errors import Unavailable
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.board import home_of
from tilewire.service.ipc.messages import (
    AdoptTensor,
    AwaitCopy,
    DeleteTensor,
    DescribeTensor,
    Done,
    Failed,
    GetTensor,
    OrderTensor,
    PutTensor,
    Stale,
    TensorInfo,
    Tensors,
    ToGateway,
    Upload,
)
from tilewire.service.match import Match
from tilewire.service.ops.op import TensorType
from tilewire.service.supervisor.handover import Kept
from tilewire.service.supervisor.vault import VaultWriter

KIND = TensorType("int8", (4,))
QUOTA = 3 * KIND.nbytes
WAIT_S = 20.0
HOMED_HERE, HOMED_ELSEWHERE = (next(name for name in "abcdefgh" if home_of(name, 2) == home) for home in (1, 0))


class Host:
    """One engine on the folder, with one gateway. Where the folder hangs no thread is through with anything.

    Attributes:
        answers: What it has sent to the gateway later.
    """

    def __init__(
        self,
        path: Path,
        stack: contextlib.ExitStack,
        wait_bytes: int,
        index: int = 0,
        num_engines: int = 1,
        *,
        is_hanging: bool = False,
    ) -> None:
        backend, vault = CpuBackend(), VaultWriter(-1)
        metrics = EngineMetrics(LocalTotals(), backend.identity, version="0", restarts=0)
        self.residents = Residents(backend, QUOTA, vault, index=index, num_engines=num_engines, has_store=True)
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        folder = StoreFolder(path)
        folder.create()
        self.shared = ReadThrough(
            self.residents, folder, metrics, self._calls.put, check_s=WAIT_S, wait_bytes=wait_bytes
        )
        self.store = TensorStore(
            backend,
            self.residents,
            Regions(backend, vault, MappedAtOnce(), max_bytes=0, max_copied_bytes=0),
            metrics,
            MovedAtOnce(backend),
            shared=self.shared,
        )
        if not is_hanging:
            self.store.start()
        stack.callback(self.store.close)
        self.answers: list[ToGateway] = []
        self.segment = Segment.create("tests", 4096)
        stack.callback(self.segment.close)
        self.client = Client("gateway", self.segment, self.answers.append)
        self.client.mapped = torch.frombuffer(self.segment.view, dtype=torch.uint8)

    def run_one(self) -> None:
        """Makes the next call of a thread."""
        self._calls.get(timeout=WAIT_S)()

    def ask(self, message: object) -> ToGateway | None:
        """The answer to a message, if it comes at once."""
        return self.store.answer(self.client, message)  # type: ignore[arg-type]

    def hold(self, name: str, value: bytes, match: Match | None = None) -> Tensors:
        """Uploads a tensor, up to its file; it waits for its version then."""
        self.segment.view[: len(value)] = value
        assert self.ask(PutTensor(1, name, Upload(KIND, 0), match=match)) is None
        held = self.answers.pop()
        assert isinstance(held, Tensors)
        assert self.ask(AwaitCopy(2, held.ticket)) is None
        self.run_one()
        return held

    def order(self, held: Tensors) -> TensorInfo:
        """Gives a tensor its version."""
        copied = self.answers.pop()
        assert isinstance(copied, Tensors)
        ordered = self.ask(OrderTensor(3, copied.tensors[0], held.ticket))
        assert isinstance(ordered, Tensors)
        return ordered.tensors[0]

    def put(self, name: str, value: bytes) -> TensorInfo:
        """Uploads a tensor."""
        return self.order(self.hold(name, value))

    def keep(self, name: str) -> TensorInfo:
        """Stores a result that is not durable."""
        kept = self.residents.keep(name, torch.zeros(4, dtype=torch.int8), KIND)
        assert self.ask(OrderTensor(6, kept.info, kept.ticket)) is None
        self.run_one()
        ordered = self.answers.pop()
        assert isinstance(ordered, Tensors)
        return ordered.tensors[0]

    def read(self, name: str) -> bytes:
        """Bytes of a resident."""
        info = self.residents.info(name)
        assert self.ask(GetTensor(4, name, info.type, 2048)) is None
        done = self.answers.pop()
        assert isinstance(done, Done)
        assert done.stored is not None
        assert done.stored.info == info
        return bytes(self.segment.view[2048 : 2048 + info.type.nbytes])

    def load(self, name: str) -> ToGateway:
        """The answer to a question for a name that is not resident."""
        assert self.ask(DescribeTensor(5, name)) is None
        self.run_one()
        return self.answers.pop()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def hosts(tmp_path: Path, stack: contextlib.ExitStack) -> tuple[Host, Host]:
    return Host(tmp_path, stack, 2**20), Host(tmp_path, stack, 2**20)


def test_an_upload_is_resident_when_its_file_is_there(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    one, other = hosts
    held = one.hold("w", b"1234")
    assert len(list(tmp_path.glob("*/w@*"))) == 1
    assert one.residents.at("w") is None
    info = one.order(held)
    assert info.tag == info.stored > 0
    assert one.read("w") == b"1234"
    described = other.load("w")
    assert isinstance(described, Tensors)
    assert described.tensors[0].stored == info.stored
    assert other.read("w") == b"1234"


def test_many_commands_share_one_load(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("w", b"1234")
    for number in range(3):
        assert other.ask(DescribeTensor(number, "w")) is None
    other.run_one()
    assert [answer.id for answer in other.answers if isinstance(answer, Tensors)] == [0, 1, 2]
    missing = other.load("nothing")
    assert isinstance(missing, Failed)
    assert missing.code == "not_found"


def test_the_commands_of_a_gateway_that_is_gone_are_dropped(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("w", b"1234")
    assert other.ask(DescribeTensor(1, "w")) is None
    other.store.detach(other.client)
    other.run_one()
    assert other.answers == []
    assert other.read("w") == b"1234"


def test_an_upload_that_another_came_behind_does_not_come_back(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    first = one.hold("w", b"1111")
    kept = one.answers.pop()
    second = one.put("w", b"2222")
    one.answers.append(kept)
    assert one.order(first).version == 0
    assert one.read("w") == b"2222"
    # Nor behind a deletion.
    third = one.hold("w", b"3333")
    kept = one.answers.pop()
    assert one.ask(DeleteTensor(6, "w")) is None
    one.run_one()
    assert isinstance(one.answers.pop(), Tensors)
    assert one.residents.at("w") is None
    one.answers.append(kept)
    assert one.order(third).version == 0
    assert one.residents.at("w") is None
    assert one.residents.nbytes == 0
    assert second.stored > 0


def test_a_load_that_a_change_overtook_is_made_again(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("w", b"1111")
    assert other.ask(DescribeTensor(1, "w")) is None
    # The load is done, and its outcome waits for the loop while an upload gets its file and its version.
    outcome = other._calls.get(timeout=WAIT_S)
    info = other.put("w", b"2222")
    outcome()
    described = other.answers.pop()
    assert isinstance(described, Tensors)
    assert described.tensors[0].stored == info.stored
    assert other.read("w") == b"2222"


def test_a_failed_condition_leaves_the_tensor_and_no_file(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    one, other = hosts
    info = one.put("w", b"1111")
    other.hold("w", b"2222", (info.stored + 1,))
    refused = other.answers.pop()
    assert isinstance(refused, Failed)
    assert refused.code == "precondition_failed"
    assert len(list(tmp_path.glob("*/*"))) == 1
    # A read that demands what this host lacks looks at the folder.
    other.load("w")
    newer = one.put("w", b"3333")
    assert isinstance(other.ask(DescribeTensor(1, "w", match=(info.stored,))), Tensors)
    assert other.ask(DescribeTensor(2, "w", match=(newer.stored,))) is None
    other.run_one()
    assert isinstance(other.answers.pop(), Tensors)
    assert other.read("w") == b"3333"


@pytest.mark.parametrize("leave", ["the gateway gives up", "the gateway is gone"])
def test_an_upload_that_nobody_awaits_any_more_is_not_made(
    tmp_path: Path, stack: contextlib.ExitStack, leave: str
) -> None:
    """What came to another host meanwhile would be replaced."""
    one, other = Host(tmp_path, stack, 2**20, is_hanging=True), Host(tmp_path, stack, 2**20)
    assert one.ask(PutTensor(1, "w", Upload(KIND, 0))) is None
    held = one.answers.pop()
    assert isinstance(held, Tensors)
    if leave == "the gateway is gone":
        one.store.detach(one.client)
    else:
        one.ask(AdoptTensor(2, held.ticket, held.tensors[0]))
    assert other.put("w", b"5678").stored
    one.store.start()
    one.run_one()
    assert isinstance(one.load("w"), Tensors)
    assert one.read("w") == b"5678"


def test_what_another_host_changed_is_dropped_and_loaded_again(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    one.put("w", b"1111")
    other.load("w")
    (watched,) = other.shared.watched()
    newer = one.put("w", b"2222")
    other.shared.on_changed(watched, newer.stored)
    assert other.residents.at("w") is None
    assert other.ask(GetTensor(1, "w", KIND, 0)) == Stale(1, (), ("w",))
    other.load("w")
    # The report about a tensor that is gone changes nothing.
    other.shared.on_changed(watched, newer.stored)
    assert other.read("w") == b"2222"


def test_a_follower_gives_up_what_another_host_changed(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    """Its home engine may be away, and takes no look then."""
    follower = Host(tmp_path, stack, 2**20, index=1, num_engines=2)
    for name, stored in ((HOMED_ELSEWHERE, 8), (HOMED_HERE, 8)):
        fd = make_copy(name, KIND.nbytes)
        info = TensorInfo(name, KIND, 0.0, version=5, placement="replicate", engines=(0,), stored=stored)
        follow(follower.residents, Kept(name, info, fd, version=5, home=home_of(name, 2)))
    nbytes = follower.residents.nbytes
    watched = {one.name: one for one in follower.shared.watched()}
    follower.shared.on_changed(watched[HOMED_ELSEWHERE], 9)
    assert follower.residents.nbytes == nbytes - KIND.nbytes
    described = follower.ask(DescribeTensor(1, HOMED_ELSEWHERE))
    assert isinstance(described, Tensors)
    assert described.tensors[0].engines == (0,)
    # It has nothing more to look at, and the other name is its own to order.
    assert [one.name for one in follower.shared.watched()] == [HOMED_HERE]
    follower.shared.on_changed(watched[HOMED_HERE], 9)
    assert follower.residents.at(HOMED_HERE) is None


def test_a_home_engine_looks_again_when_the_holder_has_given_a_tensor_up(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    """Both look for changes, each at its own time; who asks in between is answered with the change."""
    name, other = HOMED_ELSEWHERE, Host(tmp_path, stack, 2**20)
    home = Host(tmp_path, stack, 2**20, index=0, num_engines=2)
    written = other.put(name, b"1111")
    held = TensorInfo(name, KIND, 0.0, placement="single", engines=(1,), stored=written.stored)
    ordered = home.ask(OrderTensor(1, held, ticket=1))
    assert isinstance(ordered, Tensors)
    first = home.ask(DescribeTensor(2, name))
    assert isinstance(first, Tensors)
    assert first.tensors[0].engines == (1,)
    other.put(name, b"2222")
    assert home.ask(DescribeTensor(3, name, first.tensors[0].version)) is None
    home.run_one()
    (again,) = home.answers
    assert isinstance(again, Tensors)
    assert again.tensors[0].engines == (0,)
    assert home.read(name) == b"2222"
    # It may have had no room, and the file is the last one still.
    held = msgspec.structs.replace(again.tensors[0], engines=(1,))
    ordered = home.ask(OrderTensor(4, held, ticket=2))
    assert isinstance(ordered, Tensors)
    assert home.residents.nbytes == 0
    assert home.ask(DescribeTensor(5, name, ordered.tensors[0].version)) is None
    home.run_one()
    assert home.read(name) == b"2222"


def test_a_load_that_a_result_of_another_engine_overtook_is_dropped(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    name, other = HOMED_ELSEWHERE, Host(tmp_path, stack, 2**20)
    home = Host(tmp_path, stack, 2**20, index=0, num_engines=2)
    written = other.put(name, b"1111")
    assert home.ask(DescribeTensor(1, name)) is None
    # The engine that holds the result has written its file, too.
    result = TensorInfo(name, KIND, 0.0, placement="single", engines=(1,), stored=written.stored + 1)
    assert isinstance(home.ask(OrderTensor(2, result, ticket=1)), Tensors)
    home.run_one()
    (described,) = home.answers
    assert isinstance(described, Tensors)
    assert described.tensors[0].stored == written.stored + 1


def test_a_result_of_this_host_stands_above_what_the_store_had_when_it_was_ordered(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    before = other.put("w", b"1111")
    kept = one.keep("w")
    assert (kept.stored, kept.base) == (0, before.stored)
    assert one.ask(DescribeTensor(1, "w", match=(before.stored,))) is None
    one.run_one()
    assert one.read("w") == bytes(4)
    after = other.put("w", b"2222")
    # Whoever looks first, also an engine that has taken the result over.
    one.residents.restore(Kept("w", kept, make_copy("w", KIND.nbytes), version=kept.version, home=0))
    (watched,) = one.shared.watched()
    assert not watched.is_changed(before.stored)
    assert watched.is_changed(after.stored)
    # A read that demands what is not here has the folder looked at.
    assert isinstance(one.ask(DescribeTensor(1, "w", match=(kept.version,))), Tensors)
    assert one.ask(DescribeTensor(1, "w", match=(after.stored,))) is None
    one.run_one()
    assert one.read("w") == b"2222"


def test_a_load_that_a_result_of_this_host_overtook_is_dropped(hosts: tuple[Host, Host]) -> None:
    one, other = hosts
    other.put("w", b"1111")
    held = one.residents.keep("w", torch.zeros(4, dtype=torch.int8), KIND)
    assert one.ask(DescribeTensor(1, "w")) is None
    ordered, _ = one.residents.order(held.info, held.ticket)
    one.run_one()
    (described,) = one.answers
    assert isinstance(described, Tensors)
    assert described.tensors == (ordered,)
    assert one.read("w") == bytes(4)


def test_the_least_recently_used_gives_way_but_what_only_this_host_has_stays(hosts: tuple[Host, Host]) -> None:
    one, _ = hosts
    here = one.keep("here")
    one.put("a", b"aaaa")
    one.put("b", b"bbbb")
    resident = one.residents.at("a")
    assert resident is not None
    one.residents.use(resident)
    one.put("c", b"cccc")
    assert {name for name, _ in one.residents.items()} == {"a", "c", "here"}
    assert one.residents.nbytes == QUOTA
    assert isinstance(one.load("b"), Tensors)
    assert one.read("b") == b"bbbb"
    assert one.residents.at("here") is not None
    assert here.stored == 0


def test_a_large_tensor_is_not_waited_for(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    one, other = Host(tmp_path, stack, 2**20), Host(tmp_path, stack, KIND.nbytes - 1)
    one.put("w", b"1234")
    assert other.ask(DescribeTensor(1, "w")) is None
    other.run_one()
    refused = other.answers.pop()
    assert isinstance(refused, Failed)
    assert (refused.code, refused.retry_after_s) == ("unavailable", 1)
    with pytest.raises(Unavailable, match="being loaded"):
        other.ask(DescribeTensor(2, "w"))
    other.run_one()
    assert other.answers == []
    assert isinstance(other.ask(DescribeTensor(3, "w")), Tensors)

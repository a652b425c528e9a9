"""Online tuning: what is asked most is raced, a clear winner is chosen from then on, and kept; nothing else changes."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch

from tilewire.kernels.matmul.configs import VENDOR, Config, Problem
from tilewire.kernels.matmul.op import matmul, prepare_matmul
from tilewire.kernels.matmul.select import described, ranked, select, select_invariant
from tilewire.kernels.matmul.shape import MatmulShape
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN
from tilewire.kernels.selection.learned import Choice, Learned, Product, install
from tilewire.kernels.selection.racing import MAX_BYTES, Opened, Racer, choices_of, in_words, reader_for, shape_of

H200 = KNOWN["nvidia_h200"]
SHAPE = MatmulShape(504, 1832, 4832)
PRODUCT = Product(SHAPE.problem, True)
SMALL = Product(MatmulShape(64, 64, 64).problem, True)


class FakeCall:
    """Launches a configuration on the first set."""

    def __init__(self, operands, config):
        self.operands, self.config = operands, config

    def __call__(self, index):
        assert index == 0, "only the first set's output is looked at"
        wrong, output = self.operands.wrong, self.operands.output
        if self.config not in wrong:
            output.copy_(torch.arange(1.0, 5.0))
        elif wrong[self.config] is not None:
            output.fill_(wrong[self.config])


class FakeOperands:
    """Right but for those that are `wrong`, which leave the output as it was, or write other numbers."""

    def __init__(self, wrong):
        self.wrong, self.output = wrong, torch.zeros(4)

    def launcher(self, config):
        return FakeCall(self, config)

    def poison(self):
        self.output.fill_(float("nan"))


class FakeTimer:
    """A call takes what `times` says of its configuration; slow where it says nothing."""

    def __init__(self, times):
        self.times, self.turns = times, []

    def ready(self, call, num_sets, expected_us):
        timer = self

        class Ready:
            def turn_us(self):
                timer.turns.append(call.config)
                return timer.times.get(call.config, 500.0)

        return Ready()


def racer_of(learned, times, wrong=None, *, has_room=True, with_vendor=False):
    timer = FakeTimer(times)
    opened = Opened(FakeOperands(wrong or {}), 2) if has_room else None
    return Racer(learned, H200, timer, lambda shape: opened, with_vendor=with_vendor), timer


def run(racer, limit=5000):
    for number in range(limit):
        if not racer.step():
            return number
    raise AssertionError("it never ends")


@pytest.fixture
def learned():
    found = Learned()
    install(H200, found)
    yield found
    install(H200, None)


def test_a_clear_winner_is_chosen_from_then_on(learned):
    present, other = select(SHAPE.problem, H200), ranked(SHAPE.problem, H200)[3][1]
    assert present != other
    learned.calls_of(PRODUCT).count = 10
    racer, timer = racer_of(learned, {present: 30.0, other: 20.0})
    assert run(racer) > 10
    assert select(SHAPE.problem, H200) == other
    (choice,) = learned.choices.values()
    assert (choice.us, choice.before_us) == (20.0, 30.0)
    shown = {
        "op": "matmul",
        "key": "504x1832x4832 bfloat16 kn",
        "config": described(other),
        "us": 20.0,
        "before_us": 30.0,
    }
    assert choices_of(learned) == [{**shown, "date": choice.date}]
    assert learned.version == 1
    # The winner and the present choice have every turn, the slow few.
    assert (
        timer.turns.count(other)
        == timer.turns.count(present)
        > 2 * timer.turns.count(ranked(SHAPE.problem, H200)[5][1])
    )
    # Neither invariant choices nor other products change.
    assert select_invariant(SHAPE.problem, H200) == select_invariant(SHAPE.problem, KNOWN["nvidia_h100"])
    assert select(SHAPE.problem, H200, is_plain=False) == select(SHAPE.problem, KNOWN["nvidia_h100"], is_plain=False)


@pytest.mark.parametrize("us", [29.5, 40.0])
def test_what_is_hardly_faster_changes_nothing(learned, us):
    present, other = select(SHAPE.problem, H200), ranked(SHAPE.problem, H200)[3][1]
    learned.calls_of(PRODUCT).count = 1
    run(racer_of(learned, {present: 30.0, other: us})[0])
    assert learned.choices == {}
    assert learned.version == 0


@pytest.mark.parametrize("written", [None, 7.0])
def test_a_wrong_winner_is_not_chosen(learned, written):
    present, other = select(SHAPE.problem, H200), ranked(SHAPE.problem, H200)[3][1]
    learned.calls_of(PRODUCT).count = 1
    run(racer_of(learned, {present: 30.0, other: 3.0}, wrong={other: written})[0])
    assert select(SHAPE.problem, H200) == present
    assert learned.choices == {}


def test_without_memory_there_is_no_race(learned):
    learned.calls_of(PRODUCT).count = 1
    racer, timer = racer_of(learned, {}, has_room=False)
    run(racer)
    assert timer.turns == []


def test_a_race_that_runs_out_of_memory_ends_and_the_next_begins(learned):
    learned.calls_of(PRODUCT).count = 1000
    learned.calls_of(SMALL).count = 1
    timer = FakeTimer({})

    def opened(shape):
        if shape.problem == SHAPE.problem:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Opened(FakeOperands({}), 2)

    run(Racer(learned, H200, timer, opened))
    assert set(timer.turns) <= {config for _, config in ranked(SMALL.problem, H200)}
    assert timer.turns
    assert learned.busiest(lambda product: 1.0) is None


def test_a_race_that_is_given_up_frees_its_operands_and_begins_again(learned):
    present, other = select(SHAPE.problem, H200), ranked(SHAPE.problem, H200)[3][1]
    learned.calls_of(PRODUCT).count = 1
    timer, operands = FakeTimer({present: 30.0, other: 20.0}), []

    def opened(shape):
        made = FakeOperands({})
        operands.append(weakref.ref(made))
        return Opened(made, 2)

    racer = Racer(learned, H200, timer, opened)
    racer.give_up()
    while not timer.turns:
        assert racer.step()
    racer.give_up()
    # A class of `FakeTimer` refers to itself.
    gc.collect()
    (first,) = operands
    assert first() is None
    run(racer)
    assert len(operands) == 2
    assert select(SHAPE.problem, H200) == other


def test_a_product_that_was_forgotten_may_be_raced_again():
    learned = Learned(max_counted=1)
    for product in (PRODUCT, SMALL, PRODUCT):
        learned.calls_of(product).count = 1
        assert learned.busiest(lambda product: 1.0) == product
        learned.settle(product, None)
        assert learned.busiest(lambda product: 1.0) is None


def test_what_took_most_time_is_raced_first_and_each_once(learned):
    learned.calls_of(SMALL).count = 5
    learned.calls_of(PRODUCT).count = 3
    racer, timer = racer_of(learned, {})
    run(racer)
    mine, others = ({config for _, config in ranked(one.problem, H200)} for one in (PRODUCT, SMALL))
    first = timer.turns[0]
    assert first in mine
    assert set(timer.turns) & (others - mine)
    num = len(timer.turns)
    learned.calls_of(PRODUCT).count += 1000
    assert not racer.step()
    assert len(timer.turns) == num


def test_without_launches_there_is_nothing_to_do(learned):
    learned.calls_of(PRODUCT)
    racer, timer = racer_of(learned, {})
    assert not racer.step()
    assert timer.turns == []


@pytest.mark.parametrize(
    "problem",
    [
        replace(SHAPE.problem, a_major="any", b_major="any", is_aligned_in=False, is_padded_a=False, is_padded_b=False),
        MatmulShape(8192, 8192, 8192).problem,
        MatmulShape(16, 30000, 2 * MAX_BYTES // 30000 // 2).problem,
    ],
    ids=["no shape has its strides", "takes long", "takes memory"],
)
def test_what_cannot_be_raced_is_left_as_it_is(learned, problem):
    learned.calls_of(Product(problem, True)).count = 7
    racer, timer = racer_of(learned, {})
    run(racer)
    assert timer.turns == []
    assert learned.choices == {}


@pytest.mark.parametrize(
    "shape",
    [
        SHAPE,
        MatmulShape(3, 1000, 77, is_padded=False),
        MatmulShape(16, 128, 64, 4, "float32", precision="tf32", b_major="k"),
        MatmulShape(16, 128, 64, dtype="int8", out_dtype="int32", b_major="k"),
        MatmulShape(16, 128, 64, dtype="float8_e4m3fn", precision="fast", b_major="k", activation="relu"),
    ],
)
def test_a_products_shape_is_found(shape):
    found = shape_of(Product(shape.problem, shape.is_plain))
    assert found is not None
    assert found.problem == shape.problem
    assert found.is_plain == shape.is_plain


def test_choices_are_kept_over_starts(tmp_path):
    path = tmp_path / "folder" / "learned.json"
    config = ranked(SHAPE.problem, H200)[2][1]
    first, second = Learned(path), Learned(path)
    first.settle(PRODUCT, Choice(config, 20.0, 30.0, "2026-11-24"))
    second.settle(SMALL, Choice(select(SMALL.problem, H200), 2.0, 3.0, "2026-11-24"))
    again = Learned(path)
    assert again.load(reader_for(H200)) == 2
    assert again.find(PRODUCT) == config
    assert again.version == 0
    # Nothing that was learned is raced again.
    again.calls_of(PRODUCT).count = 5
    assert again.busiest(lambda product: 1.0) is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"choices": 3}', '{"choices": [3, {}, {"problem": {}}]}'])
def test_a_damaged_file_is_no_choice(tmp_path, text):
    path = tmp_path / "learned.json"
    path.write_text(text)
    assert Learned(path).load(reader_for(H200)) == 0


def test_a_folder_that_cannot_be_written_loses_no_choice(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    learned = Learned(tmp_path / "file" / "learned.json")
    for product in (PRODUCT, SMALL):
        learned.settle(product, Choice(select(product.problem, H200), 2.0, 3.0, "2026-11-24"))
    assert list(learned.choices) == [PRODUCT, SMALL]
    (record,) = caplog.records
    assert "choices are not kept" in record.getMessage()


def test_entries_of_another_build_are_left_out(tmp_path):
    path = tmp_path / "learned.json"
    learned = Learned(path)
    learned.settle(PRODUCT, Choice(select(SHAPE.problem, H200), 20.0, 30.0, "2026-11-24"))
    entry = json.loads(path.read_text())["choices"][0]
    others = [
        {**entry, "config": {**entry["config"], "block_m": 48}},
        {**entry, "config": {**entry["config"], "no_such_field": 1}},
        {**entry, "problem": {"m": 3}},
        {**entry, "us": "fast"},
    ]
    path.write_text(json.dumps({"choices": [*others, entry]}))
    again = Learned(path)
    assert again.load(reader_for(H200)) == 1
    assert again.find(PRODUCT) == select(SHAPE.problem, H200)


def test_memory_is_bounded(tmp_path):
    learned = Learned(tmp_path / "learned.json", max_counted=3, max_learned=2)
    products = [Product(replace(SHAPE.problem, m=m), True) for m in range(8, 80, 8)]
    for number, product in enumerate(products, 1):
        learned.calls_of(product).count = number
        learned.settle(product, Choice(select(product.problem, H200), 1.0, 2.0, "2026-11-24"))
    assert list(learned.choices) == products[-2:]
    assert len(json.loads((tmp_path / "learned.json").read_text())["choices"]) == 2
    assert learned.calls_of(products[0]).count == 0


def test_launches_are_counted_and_take_the_choice_that_was_learned():
    """In the interpreter, through the public function."""
    a, b = torch.randn(20, 48), torch.randn(48, 40)
    before = prepare_matmul(a, b, torch.empty(20, 40))
    learned = Learned()
    install(INTERPRETER, learned)
    try:
        for _ in range(3):
            matmul(a, b)
        product = learned.busiest(lambda product: 1.0)
        assert product is not None
        assert (product.problem.m, product.problem.n, product.problem.k) == (20, 40, 48)
        assert learned.calls_of(product).count == 3
        config = Config("pointer", 32, 16, 16)
        assert select(product.problem, INTERPRETER) != config
        learned.settle(product, Choice(config, 1.0, 2.0, "2026-11-24"))
        prepared = prepare_matmul(a, b, torch.empty(20, 40))
        assert prepared.variants != before.variants
        torch.testing.assert_close(matmul(a, b), a @ b)
        # What follows a product makes it another one.
        assert learned.find(Product(product.problem, False)) is None
    finally:
        install(INTERPRETER, None)
    assert prepare_matmul(a, b, torch.empty(20, 40)).variants == before.variants


@pytest.mark.parametrize("with_vendor", [True, False])
def test_the_vendor_library_takes_part_only_if_asked(learned, with_vendor):
    present = select(SHAPE.problem, H200)
    learned.calls_of(PRODUCT).count = 1
    racer, timer = racer_of(learned, {present: 30.0, VENDOR: 20.0}, with_vendor=with_vendor)
    run(racer)
    assert (VENDOR in timer.turns) == with_vendor
    assert (select(SHAPE.problem, H200) == VENDOR) == with_vendor


@pytest.mark.parametrize(
    "shape",
    [
        replace(SHAPE, activation="relu"),
        replace(SHAPE, batch=2),
        replace(SHAPE, out_dtype="float32"),
        replace(SHAPE, dtype="int8", b_major="k"),
        replace(SHAPE, dtype="float8_e4m3fn", b_major="k"),
        replace(SHAPE, dtype="float32", precision="tf32x3", b_major="k"),
    ],
    ids=["an epilogue", "a batch", "a conversion", "int8", "float8", "tf32x3"],
)
def test_the_vendor_library_computes_no_other_product(learned, shape):
    learned.calls_of(Product(shape.problem, shape.is_plain)).count = 1
    racer, timer = racer_of(learned, {VENDOR: 1.0}, with_vendor=True)
    run(racer)
    assert timer.turns
    assert VENDOR not in timer.turns


def test_a_kept_choice_of_the_vendor_library_counts_only_if_asked(tmp_path):
    path = tmp_path / "learned.json"
    Learned(path).settle(PRODUCT, Choice(VENDOR, 20.0, 30.0, "2026-11-24"))
    assert Learned(path).load(reader_for(H200)) == 0
    assert Learned(path).load(reader_for(H200, with_vendor=True)) == 1


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("layout", ["rows", "padded rows", "columns", "three dimensions"])
def test_the_vendor_librarys_product_is_right_where_it_was_chosen(layout, precision):
    a, b, out = torch.randn(20, 48), torch.randn(48, 40), torch.empty(20, 40)
    if layout == "padded rows":
        a, out = torch.empty(20, 64)[:, :48].copy_(a), torch.empty(20, 64)[:, :40]
    elif layout == "columns":
        b = torch.empty(40, 48).mT.copy_(b)
    elif layout == "three dimensions":
        a, out = a.view(4, 5, 48), out.view(4, 5, 40)
    learned = Learned()
    install(INTERPRETER, learned)
    try:
        matmul(a, b, out=out, precision=precision)
        product = learned.busiest(lambda product: 1.0)
        assert product is not None
        learned.settle(product, Choice(VENDOR, 1.0, 2.0, "2026-11-24"))
        prepared = prepare_matmul(a, b, out, precision=precision)
        assert prepared.variants == ()
        out.fill_(float("nan"))
        prepared(a, b, out)
        torch.testing.assert_close(out, torch.matmul(a, b))
        assert learned.calls_of(product).count == 2
    finally:
        install(INTERPRETER, None)


def test_words_name_a_product():
    assert in_words(PRODUCT) == "504x1832x4832 bfloat16 kn"
    problem = Problem(4, 8, 16, 3, "float32", "float32", b_major="k", precision="tf32")
    assert in_words(Product(problem, False)) == "3x4x8x16 float32 kk tf32 with an epilogue"

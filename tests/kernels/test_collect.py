"""Collecting measurements: shapes are repeatable, candidates name their binaries, a broken process costs one shape."""

import json
import math
import random

import pytest

from tilewire.kernels.autotune.benches import operands_of
from tilewire.kernels.autotune.collect import (
    _binaries,
    candidates,
    draw,
    entries_of,
    is_supported,
    measure_shape,
    progress_of,
)
from tilewire.kernels.autotune.compiling import Facts
from tilewire.kernels.autotune.workloads import as_line, parse_line
from tilewire.kernels.matmul.configs import Config
from tilewire.kernels.op import config_from, config_text
from tilewire.kernels.registry import measured_ops
from tilewire.kernels.runtime.targets import INTERPRETER, KNOWN

OPS = [op.name for op in measured_ops()]
H100 = KNOWN["nvidia_h100"]
FITS = Facts(shared_bytes=30000, registers=100, spilled_bytes=0, num_threads=128)


def test_random_shapes_are_repeatable_and_of_every_group():
    drawn = draw(3, 0.2, OPS)
    assert drawn == draw(3, 0.2, OPS)
    assert drawn != draw(4, 0.2, OPS)
    assert {shape.op for shape in drawn} == set(OPS)
    assert all(parse_line(as_line(shape)) == shape for shape in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvidia_h100", "nvidia_a100", "amd_mi300x"])
def test_every_candidate_names_its_binaries(name):
    target = KNOWN[name]
    for shape in draw(5, 0.05, OPS):
        if not is_supported(shape, target):
            continue
        found = candidates(shape, target)
        assert shape.chosen(target) == found[0]
        assert all(_binaries(shape, config, target) for config in found)


class FakeBench:
    """Configurations take longer the later they come; another's way is as fast as the second."""

    def __init__(self, configs):
        self.us = {config: 10.0 + number for number, config in enumerate(configs)} | {"torch": 11.0}

    def vendors(self, shape):
        return ["torch"]

    def once_us(self, shape, configs):
        return [self.us[config] for config in configs]

    def in_turns_us(self, shape, configs, rounds):
        return [self.us[config] for config in configs]

    def errors(self, shape, configs):
        return {config: math.nan if number == 1 else 1e-4 for number, config in enumerate(configs)}


def test_a_line_holds_times_vendors_and_wrong_results():
    shape = draw(5, 0.05, ["matmul"])[0]
    configs = candidates(shape, H100)[:5]
    entry = json.loads(json.dumps(measure_shape(FakeBench(configs), shape, dict.fromkeys(configs, FITS), H100)))
    assert entry["us"] == {config_text(config): 10.0 + number for number, config in enumerate(configs)}
    assert entry["vendors"] == {"torch": 11.0}
    assert list(entry["bad"]) == [config_text(configs[1])]


def test_a_shape_that_was_begun_is_not_begun_again(tmp_path):
    path = tmp_path / "measured.jsonl"
    path.write_text('{"device":{}}\n{"begun":"a"}\n{"line":"a","us":{}}\n{"begun":"b"}\n{"line":"c","u')
    assert progress_of(path) == ({"a", "b"}, {"a"})
    assert len(list(entries_of(path))) == 4


@pytest.mark.parametrize("op", measured_ops(), ids=OPS)
def test_operands_notice_a_wrong_result(op):
    """In the interpreter: dispatch's own configuration is right, and an output that nobody wrote is not."""
    generator = random.Random(1)
    shape = min((generator.choice(op.groups).draw(generator) for _ in range(300)), key=lambda each: each.num_bytes)
    assert shape.chosen(INTERPRETER) is not None
    operands = operands_of(shape, 2, device="cpu")
    operands.poison()
    error = operands.error()
    if error is None:
        return
    assert not error < 0.9
    operands.launcher(None)(0)
    after = operands.error()
    assert after is not None
    assert after < 0.05


def test_configurations_read_back_as_what_they_were():
    for shape in draw(5, 0.03, OPS):
        for config in candidates(shape, H100):
            assert config_from(type(config), config_text(config)) == config


def test_texts_of_before_a_field_was_added_are_read():
    text = "wgmma,128,64,64,8,1,8,8,1,0,1,0,0,"
    assert config_from(Config, text) == Config("wgmma", 128, 64, 64, num_warps=8, num_stages=8, is_persistent=True)
    with pytest.raises(ValueError, match="more fields"):
        config_from(Config, f"{text},1,1")

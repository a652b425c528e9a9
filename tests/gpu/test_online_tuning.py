"""Races between requests on a real device: turns are short, choices are right and kept, and memory is given back."""

import contextlib
import time

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

import httpx

import tilewire
from tilewire.kernels import matmul, prepare_matmul
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.selection.learned import Learned, install
from tilewire.kernels.selection.racing import MAX_BYTES, GraphTimer, Racer, open_on, reader_for
from tilewire.service.cli.launch import running_server
from tilewire.service.engine.backends.contract import HostBytes, Preparation
from tilewire.service.engine.backends.gpu.backend import GpuBackend
from tilewire.service.errors import TooBusy
from tilewire.service.ops.op import TensorType

DEVICE = torch.device("cuda:0")
SHAPES = [(504, 1832, 4832), (16, 4096, 4096), (382, 6144, 4096), (1, 4096, 4096)]


@pytest.mark.alone
def test_races_are_short_turns_and_their_choices_are_right(tmp_path):
    target, path = current(0), tmp_path / "learned.json"
    learned = Learned(path)
    install(target, learned)
    try:
        operands = [
            (torch.randn(m, k, device=DEVICE).bfloat16(), torch.randn(k, n, device=DEVICE).bfloat16())
            for m, n, k in SHAPES
        ]
        for a, b in operands:
            for _ in range(5):
                matmul(a, b)
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        racer = Racer(learned, target, GraphTimer(), open_on(DEVICE))
        turns_s, stream = [], torch.cuda.Stream()
        while True:
            began_s = time.perf_counter()
            with torch.cuda.stream(stream):
                may_go_on = racer.step()
            turns_s.append(time.perf_counter() - began_s)
            if not may_go_on:
                break
        turns_s.sort()
        print(
            f"{len(turns_s)} turns, p50 {turns_s[len(turns_s) // 2] * 1e3:.2f} ms, longest {turns_s[-1] * 1e3:.2f} ms"
        )
        for choice in learned.choices.values():
            print(choice)
        assert turns_s[len(turns_s) // 2] < 2e-3
        assert torch.cuda.memory_reserved() - reserved < 2 * MAX_BYTES
        for a, b in operands:
            expected, out = a.double() @ b.double(), torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=DEVICE)
            prepare_matmul(a, b, out)(a, b, out)
            for found in (out, matmul(a, b)):
                assert ((found.double() - expected).norm() / expected.norm()).item() < 5e-3
        assert Learned(path).load(reader_for(target)) == len(learned.choices)
    finally:
        install(target, None)


# It takes the device's whole memory.
@pytest.mark.alone
def test_a_request_without_memory_ends_the_race_and_has_its_memory():
    backend = GpuBackend("cuda:0")
    hogs: list[torch.Tensor] = []
    try:
        backend.warm_up(Preparation(warmup="load", is_tuned_online=True), lambda *_: None, lambda _: None)
        a, b = (torch.randn(shape, device=DEVICE).bfloat16() for shape in ((382, 6144), (6144, 4096)))
        matmul(a, b)
        before = torch.cuda.memory_allocated()
        while torch.cuda.memory_allocated() < before + 2**26:
            assert backend.tune(), "no race took memory"
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_allocated() - before
        source = HostBytes(torch.zeros(taken * 3 // 4, dtype=torch.uint8), TensorType("int8", (taken * 3 // 4,)), 0)
        # Other processes on this GPU may free memory meanwhile.
        while (free := torch.cuda.mem_get_info()[0]) > taken * 5 // 8:
            with contextlib.suppress(torch.OutOfMemoryError):
                hogs.append(torch.empty(free - taken // 2, dtype=torch.uint8, device=DEVICE))
        with pytest.raises(TooBusy, match="no memory"):
            backend.reserve(source)
        assert torch.cuda.memory_allocated() <= before + sum(hog.numel() for hog in hogs) + 2**20
        assert backend.reserve(source).numel() == source.type.nbytes
        # There is too little memory for a race now: tuning goes on without one.
        while backend.tune():
            pass
    finally:
        hogs.clear()
        install(current(0), None)
        torch.cuda.empty_cache()


@pytest.mark.timeout(600)
def test_a_service_learns_while_it_is_idle_and_goes_on_being_right():
    rng = np.random.default_rng(5)
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((64, 512), (512, 768)))
    with (
        running_server("--device", "cuda:0", "--gateways", "1") as url,
        tilewire.Client(url) as client,
    ):
        for _ in range(20):
            np.testing.assert_array_equal(client.matmul(a, b), a @ b)
        # A race is over when the log or the list says so; requests beside it are answered as ever.
        end_s = time.monotonic() + 30
        while time.monotonic() < end_s:
            np.testing.assert_array_equal(client.matmul(a, b), a @ b)
            time.sleep(0.5)
        (device,) = httpx.get(f"{url}/v1/kernels").json()["devices"]
        print(device["learned"])
        assert all(entry["us"] < entry["before_us"] for entry in device["learned"])

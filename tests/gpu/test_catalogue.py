"""Every binary of the catalogue on the device: launched once, right, and none beside them."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels.build.selftest import self_tests, wrong
from tilewire.kernels.registry import kernel_op
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.selection.catalogue import variants


def test_every_binary_is_tried_and_right():
    target = current(torch.cuda.current_device())
    tried = list(self_tests(target, torch.device("cuda", torch.cuda.current_device())))
    assert wrong(tried) == []
    assert {variant for trial in tried for variant in trial.variants} == set(variants(target))


def test_self_tests_are_right_while_the_device_lags_behind():
    """What a launch reads in host memory must still be there when the launch begins."""
    device = torch.device("cuda", torch.cuda.current_device())
    a = torch.zeros((8192, 8192), dtype=torch.bfloat16, device=device)
    # A second or so, while all self-tests are queued.
    for _ in range(500):
        torch.mm(a, a)
    tried = [start() for start in kernel_op("staging").self_tests(current(device.index), device)]
    assert wrong(tried) == []

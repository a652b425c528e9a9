"""Every binary of the catalogue on the device: launched once, right, and none beside them."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from tilewire.kernels.build.selftest import self_tests, wrong
from tilewire.kernels.runtime.targets import current
from tilewire.kernels.selection.catalogue import variants


def test_every_binary_is_tried_and_right():
    target = current(torch.cuda.current_device())
    tried = list(self_tests(target, torch.device("cuda", torch.cuda.current_device())))
    assert wrong(tried) == []
    assert {variant for trial in tried for variant in trial.variants} == set(variants(target))

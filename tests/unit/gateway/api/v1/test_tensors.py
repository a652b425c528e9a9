"""Reads of resident tensors: a gateway's own server, with an engine of ours."""

from __future__ import annotations

import pytest

from tests.support.gateway_bench import GatewayBench
from tests.support.raw_http import head
from tests.support.repeated_scenes import play
from tilewire.service.errors import Lost
from tilewire.service.ipc.messages import TensorInfo, Tensors
from tilewire.service.ops.op import TensorType

SHARDED = TensorInfo("w", TensorType("float32", (2, 4)), 0.0, version=7, placement="shard", axis=-1, num_parts=1)


@pytest.mark.parametrize(("is_lost", "status"), [(False, 304), (True, 410)])
def test_a_known_version_of_a_sharded_tensor_that_is_lost_is_410(is_lost: bool, status: int) -> None:
    async def scene(bench: GatewayBench) -> None:
        known = Tensors(0, (SHARDED,))
        bench.engine.descriptions = [known, Lost("name: write it again") if is_lost else known]
        reader, writer = await bench.connect()
        writer.write(head("GET", "/v1/tensors/w", if_none_match='"7"'))
        assert (await reader.readline()).startswith(b"HTTP/1.1 %d " % status)
        assert not bench.engine.descriptions

    play(scene)

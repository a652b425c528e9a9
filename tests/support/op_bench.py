"""Requests of any op on the CPU backend, from slot to slot: alone, and batched with others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tests.support.jobs import JobBench
from tilewire.service.engine.backends.host import tensor_of
from tilewire.service.engine.loop.batching import join
from tilewire.service.engine.loop.jobs import BoundJob
from tilewire.service.ops.planning import parse_options
from tilewire.service.ops.registry import OPS

Values = Mapping[str, torch.Tensor]


class OpBench(JobBench):
    """Computes ops.

    Args:
        nbytes: Size of the segment.
    """

    def __init__(self, nbytes: int = 2**22) -> None:
        super().__init__(nbytes)

    def sent(self, op: str, inputs: Values, residents: Values | None = None, /, **options: object) -> BoundJob:
        """A request: inputs in its body, residents, options as text or JSON has them."""
        placed = {name: self.put(values) for name, values in inputs.items()}
        return self.job(op, parse_options(OPS[op], options), **placed, **(residents or {}))

    def compute(self, jobs: Sequence[BoundJob]) -> list[tuple[torch.Tensor, ...]]:
        """Results of jobs that share a batch."""
        for job in jobs:
            for out in job.outs:
                tensor_of(out).fill_(77)
        self.backend.begin(join(jobs)).wait()
        return [tuple(tensor_of(out).clone() for out in job.outs) for job in jobs]

    def run(
        self, op: str, inputs: Values, residents: Values | None = None, /, **options: object
    ) -> tuple[torch.Tensor, ...]:
        """Results of one request."""
        (results,) = self.compute([self.sent(op, inputs, residents, **options)])
        return results

    def check_batch(self, jobs: Sequence[BoundJob]) -> None:
        """Checks that jobs share one launch, in which each gets what it gets alone."""
        assert len({job.key for job in jobs}) == 1
        assert jobs[0].key is not None
        assert len(join(jobs)) == 1
        together = self.compute(jobs)
        for results, job in zip(together, jobs, strict=True):
            for one, other in zip(results, self.compute([job])[0], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6, equal_nan=True)

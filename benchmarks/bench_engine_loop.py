"""Time of the engine's loop thread for one small job: its share of the thread's CPU time, with a backend that computes nothing.

    python -m benchmarks.bench_engine_loop --batch 64

Prints the median over rounds, in microseconds.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import threading
import time
from collections.abc import Sequence

import torch

from benchmarks.idle_engine import NoTotals
from tilewire.service.engine.backends.contract import HostBytes, LaunchSpec
from tilewire.service.engine.backends.cpu import CpuBackend, Finished
from tilewire.service.engine.loop.ipc import Mailbox
from tilewire.service.engine.loop.jobs import Call
from tilewire.service.engine.loop.loop import EngineLoop
from tilewire.service.engine.metrics import EngineMetrics
from tilewire.service.engine.tensors.commands import TensorStore
from tilewire.service.engine.tensors.host_mappings import HostMappings
from tilewire.service.engine.tensors.residents import Residents
from tilewire.service.engine.tensors.shared_regions import Regions
from tilewire.service.engine.tensors.transfers import TransferThread
from tilewire.service.ipc.arena import Segment
from tilewire.service.ipc.messages import (
    FrameDecoder,
    Hello,
    InputSpec,
    Job,
    OutputSpec,
    Template,
    Timings,
    ToGateway,
    Welcome,
    encode_frame,
)
from tilewire.service.ops.matmul import MatmulOptions
from tilewire.service.ops.op import Limits, TensorType
from tilewire.service.ops.planning import plan
from tilewire.service.ops.registry import OPS
from tilewire.service.supervisor.vault import VaultWriter

A, B = TensorType("float16", (1, 256)), TensorType("float16", (256, 256))
SLOT_BYTES = 1024
WARM_ROUNDS = 50


class IdleBackend(CpuBackend):
    """Is done as soon as it is asked."""

    def begin(self, launches: Sequence[LaunchSpec]) -> Finished:
        """Computes nothing."""
        return Finished(Timings(h2d_ns=1000, kernel_ns=1000, d2h_ns=1000))


def measure(batch: int, rounds: int) -> list[float]:
    """Seconds of the loop thread's CPU time for each job, round by round.

    Args:
        batch: Jobs of a round, which arrive in one frame and share a launch.
        rounds: Number of rounds.
    """
    backend, vault, mailbox = IdleBackend("cpu"), VaultWriter(-1), Mailbox()
    metrics = EngineMetrics(NoTotals(), backend.identity, version="0", restarts=0)
    residents = Residents(backend, 2**30, vault)
    mappings = HostMappings(lambda call: mailbox.post(Call(call)))
    regions = Regions(backend, vault, mappings, max_bytes=0, max_copied_bytes=0)
    transfers = TransferThread(backend, lambda call: mailbox.post(Call(call)))
    residents.add([("w", HostBytes(torch.zeros(B.nbytes, dtype=torch.uint8), B, 0))], transfers.run, 0.0)
    store = TensorStore(backend, residents, regions, metrics, transfers)
    engine = EngineLoop(0, mailbox, backend, store, mappings, metrics)
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    segment_bytes = 2 * SLOT_BYTES * batch
    mailbox.connect(theirs, Hello(0, segment_bytes), Segment.create("bench", segment_bytes))
    engine.start()
    decoder: FrameDecoder[ToGateway] = FrameDecoder(ToGateway)
    while not any(isinstance(one, Welcome) for one in decoder.feed(ours.recv(2**20))):
        pass
    planned = plan(OPS["matmul"], {"a": A, "b": B}, MatmulOptions(), Limits())
    inputs = (InputSpec("a", A), InputSpec("b", B, resident="w"))
    outputs = tuple(OutputSpec(kind) for kind in planned.outputs)
    template = Template(1, "matmul", inputs, MatmulOptions(), outputs, planned.flops, planned.moved_bytes)
    ours.sendall(encode_frame([template]))
    (thread,) = (one for one in threading.enumerate() if one.name == "loop")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    took: list[float] = []
    number = 0
    for _ in range(WARM_ROUNDS + rounds):
        jobs = []
        for slot in range(batch):
            number += 1
            jobs.append(Job(number, 1, (2 * slot * SLOT_BYTES, (2 * slot + 1) * SLOT_BYTES), 0, 0, "0" * 32))
        frame, answered = encode_frame(jobs), 0
        began_s = time.clock_gettime(clock)
        ours.sendall(frame)
        while answered < batch:
            answered += sum(getattr(one, "batch_size", 0) > 0 for one in decoder.feed(ours.recv(2**20)))
        took.append((time.clock_gettime(clock) - began_s) / batch)
    engine.stop()
    ours.close()
    return took[WARM_ROUNDS:]


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=500)
    args = parser.parse_args()
    took = sorted(measure(args.batch, args.rounds))
    print(f"batch {args.batch}: p50 {statistics.median(took) * 1e6:.2f} us, fastest {took[0] * 1e6:.2f} us a job")


if __name__ == "__main__":
    main()

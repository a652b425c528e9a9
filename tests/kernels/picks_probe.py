"""Starts twice on a pretended device, as an engine does, and prints what each start did; run by `test_picks.py`.

A process of its own: the fingerprint of the kernels is that of compiled ones, not of interpreted.
"""

import json
import sys
from pathlib import Path

from tests.kernels.tuning_fakes import FakeBench
from tilewire.kernels.autotune.alternatives import chosen
from tilewire.kernels.autotune.starting import pick_at_start, warmup_buckets
from tilewire.kernels.runtime.targets import KNOWN

if __name__ == "__main__":
    target = KNOWN["nvidia_a100"]
    folder = Path(sys.argv[1])
    shown = [workload for pair in warmup_buckets(target).values() for workload in pair]
    starts = []
    for _ in range(2):
        bench = FakeBench(spread=0.8)
        picks = pick_at_start(target, folder, 600.0, lambda done, total: None, bench=bench)
        starts.append([len(bench.timed), len(picks), [str(chosen(each, target)) for each in shown]])
    tuned = pick_at_start(KNOWN["nvidia_h100"], folder, 600.0, lambda done, total: None, bench=FakeBench())
    print(json.dumps([*starts, len(tuned), len(list(folder.iterdir()))]))

"""What results that stay are worth over HTTP: search, `store=` and programs, in one run on one machine.

    python -m benchmarks.bench_resident --out benchmarks/results -- --gateways 8

Owns the questions and the report; `contenders` starts the servers, `load` sends. The searches of Tilewire, of 20 lines with
torch and of faiss on the processor have the same items and queries. Answers are checked against float32 products first.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import ml_dtypes
import numpy as np

from benchmarks.bench_batching import safetensors_of
from benchmarks.contenders import FAILURES, OCTETS, SAFETENSORS, Failure, WrongAnswer, running_command, uvicorn_words
from benchmarks.load import Call, run_load
from benchmarks.machine import describe
from tilewire import Client
from tilewire.service.cli.launch import running_server

K = 10
CONNECTIONS = 64
REPEATS = 30
# Part of the items that must be right: servers that keep scores in bfloat16 confuse neighbours.
MIN_RECALL = 0.6
HIDDEN, CLASSES, BEST = 3072, 1000, 5

Array = np.ndarray


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_resident", description=__doc__)
    parser.add_argument("--items", type=int, default=1_000_000, help="vectors to search")
    parser.add_argument(
        "--width", type=int, default=768, help="numbers of a vector, and columns of the program's input"
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 8192], help="rows of the stored products")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each load")
    parser.add_argument("--out", type=Path, required=True, help="folder for resident.json")
    parser.add_argument("serve", nargs="*", help="flags of tilewire serve, behind --")
    arguments = parser.parse_args(argv)
    failures: list[Failure] = []
    rows: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        items, queries = make_items(arguments.items, arguments.width, Path(folder, "items.safetensors"))
        right = best_of(items, queries)
        with running_server("--tensors-dir", folder, *arguments.serve) as url:
            identity = httpx.get(f"{url}/v2").json()
            with measuring(failures, "Tilewire", "search"):
                call = Call(f"/v1/search?b=@items/w&k={K}", SAFETENSORS, safetensors_of(a=queries))
                rows["search, Tilewire"] = search(url, call, right, indices_of, arguments.seconds)
            with measuring(failures, "Tilewire", "store"), Client(url, timeout=120) as client:
                rows["store"] = [store(url, client, size) for size in arguments.sizes]
            with measuring(failures, "Tilewire", "program"), Client(url, timeout=120) as client:
                rows["program"] = program(url, client, arguments.width, arguments.seconds)
        del items
        for name, app in (("20 lines", "twenty_lines_search"), ("faiss", "faiss_search")):
            if name == "faiss" and importlib.util.find_spec("faiss") is None:
                print("faiss is left out: it is not installed (pip install faiss-cpu)")
                continue
            environment = {"ITEMS": str(Path(folder, "items.safetensors"))}
            with measuring(failures, name, "search"), running_command(uvicorn_words(app), environment) as url:
                call = Call("/search", OCTETS, queries.tobytes())
                rows[f"search, {name}"] = search(url, call, right, int64s, arguments.seconds)
    found = {**describe(identity, "benchmarks.bench_resident", sys.argv[1:] if argv is None else argv)}
    found |= {"items": [arguments.items, arguments.width], "rows": rows, "failures": [vars(one) for one in failures]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "resident.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(rows, indent=1))
    return 1 if failures else 0


@contextlib.contextmanager
def measuring(failures: list[Failure], server: str, question: str) -> Iterator[None]:
    """Notes what fails; the rest is measured all the same."""
    try:
        yield
    except (*FAILURES, AssertionError) as error:
        failures.append(Failure.of(error, server, question=question))


def make_items(count: int, width: int, path: Path) -> tuple[Array, Array]:
    """Writes random items; returns them and one query of 1 row."""
    rng = np.random.default_rng(5)
    items = np.concatenate(
        [
            rng.standard_normal((min(65536, count - first), width), dtype=np.float32).astype(ml_dtypes.bfloat16)
            for first in range(0, count, 65536)
        ]
    )
    path.write_bytes(safetensors_of(w=items))
    return items, rng.standard_normal((1, width), dtype=np.float32).astype(ml_dtypes.bfloat16)


def best_of(items: Array, queries: Array) -> set[int]:
    """Indices of the best items, by float32 products."""
    query = queries.astype(np.float32)[0]
    scores = np.concatenate(
        [items[first : first + 65536].astype(np.float32) @ query for first in range(0, len(items), 65536)]
    )
    return set(np.argpartition(-scores, K)[:K].tolist())


def int64s(body: bytes) -> set[int]:
    """Indices in a body that is nothing else."""
    return set(np.frombuffer(body, np.int64).tolist())


def indices_of(body: bytes) -> set[int]:
    """Indices in a safetensors answer."""
    start = 8 + int.from_bytes(body[:8], "little")
    begin, end = json.loads(body[8:start])["indices"]["data_offsets"]
    return int64s(body[start + begin : start + end])


def search(
    url: str, call: Call, right: set[int], read: Callable[[bytes], set[int]], seconds: float
) -> dict[str, float]:
    """Requests per second and latency of one query from each of 64 connections.

    Raises:
        WrongAnswer: The items found are others.
    """
    answer = httpx.post(url + call.path, content=call.body, headers={"content-type": call.content_type}, timeout=120)
    answer.raise_for_status()
    recall = len(read(answer.content) & right) / K
    if recall < MIN_RECALL:
        raise WrongAnswer(f"recall {recall}")
    run_load(url, [call], connections=CONNECTIONS, seconds=1)
    load = run_load(url, [call], connections=CONNECTIONS, seconds=seconds)
    return {"per_s": round(load.per_s, 1), "p50_ms": load.p50_us / 1e3, "p99_ms": load.p99_us / 1e3, "recall": recall}


def store(url: str, client: Client, size: int) -> dict[str, float]:
    """Milliseconds of a product of two residents: answered, stored, and in its kernel."""
    rng = np.random.default_rng(size)
    for name in ("bench/a", "bench/b"):
        client.tensors[name] = rng.standard_normal((size, size), dtype=np.float32).astype(ml_dtypes.bfloat16)

    a, b = client.tensors["bench/a"], client.tensors["bench/b"]

    def answered() -> None:
        client.matmul(a, b)

    def stored() -> None:
        client.matmul(a, b, store="bench/y")

    taken = {"answered_ms": median_ms(answered), "stored_ms": median_ms(stored)}
    before = kernel_seconds(url)
    stored_ms = median_ms(stored)
    kernel_ms = (kernel_seconds(url) - before) / (REPEATS + 3) * 1e3
    return {
        "size": size,
        "answered_ms": round(taken["answered_ms"], 3),
        "stored_ms": round(min(stored_ms, taken["stored_ms"]), 3),
        "kernel_ms": round(kernel_ms, 3),
    }


def median_ms(ask: Callable[[], None]) -> float:
    """Median of the calls' times, after three that do not count."""
    times = []
    for _ in range(REPEATS + 3):
        began_s = time.perf_counter()
        ask()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times[3:]) * 1e3


def kernel_seconds(url: str) -> float:
    """Seconds in which the kernels of `matmul` ran."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    wanted = [line for line in lines if line.startswith("tilewire_kernel_seconds_total{") and 'op="matmul"' in line]
    return sum(float(line.rpartition(" ")[2]) for line in wanted)


def program(url: str, client: Client, width: int, seconds: float) -> dict[str, float]:
    """A program of four steps beside the same four calls, their values stored between them."""
    rng = np.random.default_rng(9)

    def weight(rows: int, columns: int) -> Array:
        return np.asarray(rng.standard_normal((rows, columns)) / rows**0.5, ml_dtypes.bfloat16)

    client.tensors["mlp/w1"] = weight(width, HIDDEN)
    client.tensors["mlp/w2"] = weight(HIDDEN, CLASSES)
    text = {
        "inputs": {"x": {"dtype": "bfloat16", "shape": [-1, width]}},
        "steps": [
            {"op": "matmul", "inputs": {"a": "x", "b": "@mlp/w1"}, "options": {"activation": "gelu"}, "as": "h"},
            {"op": "matmul", "inputs": {"a": "h", "b": "@mlp/w2"}, "as": "logits"},
            {"op": "softmax", "inputs": {"x": "logits"}, "as": "p"},
            {"op": "topk", "inputs": {"x": "p"}, "options": {"k": BEST}, "as": ["values", "indices"]},
        ],
        "outputs": ["values", "indices"],
    }
    httpx.put(f"{url}/v1/programs/bench-mlp", json=text, timeout=60).raise_for_status()
    x = weight(1, width)
    whole = Call("/v1/programs/bench-mlp", SAFETENSORS, safetensors_of(x=x))
    one = Call("/v1/matmul?b=@mlp/w1&activation=gelu", SAFETENSORS, safetensors_of(a=x))
    calls = [
        Call("/v1/matmul?b=@mlp/w1&activation=gelu&store=@mlp/h", SAFETENSORS, safetensors_of(a=x)),
        Call("/v1/matmul?a=@mlp/h&b=@mlp/w2&store=@mlp/logits", SAFETENSORS, safetensors_of()),
        Call("/v1/softmax?x=@mlp/logits&store=@mlp/p", SAFETENSORS, safetensors_of()),
        Call(f"/v1/topk?x=@mlp/p&k={BEST}", SAFETENSORS, safetensors_of()),
    ]
    expected = classes_of(url, calls)
    if classes_of(url, [whole]) != expected:
        raise WrongAnswer("the program finds other classes than its four calls")
    run_load(url, [whole], connections=CONNECTIONS, seconds=1)
    joined = run_load(url, [whole], connections=CONNECTIONS, seconds=seconds)
    apart = run_load(url, calls, connections=CONNECTIONS, seconds=seconds)
    lone, single = (run_load(url, [call], connections=1, seconds=seconds) for call in (whole, one))
    return {
        "program_per_s": round(joined.per_s, 1),
        "four_calls_per_s": round(apart.per_s / len(calls), 1),
        "lone_p50_us": lone.p50_us,
        "lone_matmul_p50_us": single.p50_us,
    }


def classes_of(url: str, calls: Sequence[Call]) -> set[int]:
    """Indices in the answer to the last call."""
    for call in calls:
        answer = httpx.post(
            url + call.path, content=call.body, headers={"content-type": call.content_type}, timeout=120
        )
        answer.raise_for_status()
    return indices_of(answer.content)


if __name__ == "__main__":
    sys.exit(run())

"""The ops of the second edition, programs, and recorded code: both clients."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import tilewire
from tests.unit.client.speaking_server import SpeakingServer

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((6, 3)).astype(np.float32)
B = np.array([0.5, -0.25, 2.0], np.float32)
MLP = {
    "inputs": {"x": {"dtype": "float32", "shape": [-1, 6]}},
    "steps": [
        {"op": "matmul", "inputs": {"a": "x", "b": "@w"}, "options": {"activation": "relu"}, "as": "h"},
        {"op": "topk", "inputs": {"x": "h"}, "options": {"k": 2}, "as": ["values", "indices"]},
    ],
    "outputs": ["values", "indices"],
}


@pytest.fixture
def server() -> SpeakingServer:
    server = SpeakingServer()
    server.tensors = {"w": W, "b": B}
    return server


@pytest.fixture(params=[tilewire.Client, tilewire.AsyncClient], ids=["blocking", "asyncio"])
def client(request: pytest.FixtureRequest, server: SpeakingServer) -> Any:
    return request.param("http://tilewire.test", transport=httpx.MockTransport(server))


def wait(result: Any) -> Any:
    async def awaited() -> Any:
        return await result

    return asyncio.run(awaited()) if inspect.isawaitable(result) else result


def test_search_and_topk(client: Any, server: SpeakingServer) -> None:
    values, indices = wait(client.search(X[:, :3], W, k=2))
    scores = X[:, :3] @ W.T
    np.testing.assert_array_equal(indices, np.argsort(-scores, axis=-1)[:, :2])
    np.testing.assert_allclose(values, -np.sort(-scores, axis=-1)[:, :2], rtol=1e-6)
    assert dict(server.requests[-1].url.params) == {"k": "2"}
    best = wait(client.topk(X, 2, axis=0, largest=False))
    assert isinstance(best, tilewire.TopK)
    np.testing.assert_array_equal(best.values, np.sort(X, axis=0)[:2])


@pytest.mark.parametrize(("axis", "sent"), [(1, "1"), (None, "all"), ("all", "all")])
def test_reduce(client: Any, server: SpeakingServer, axis: Any, sent: str) -> None:
    got = wait(client.reduce(X, "mean", axis=axis))
    np.testing.assert_allclose(got, X.mean(axis=axis if axis != "all" else None), rtol=1e-6)
    assert dict(server.requests[-1].url.params) == {"kind": "mean", "axis": sent}
    assert wait(client.reduce(X, "argmax", axis=0, keepdims=True)).dtype == np.int64


def test_normalize_and_pointwise(client: Any) -> None:
    got = wait(client.normalize(X[:, :3], "layer", weight="@b", bias=[1, 2, 3], eps=1e-3))
    assert got.shape == (4, 3)
    np.testing.assert_allclose(wait(client.pointwise("mul", X, 2.5)), X * 2.5, rtol=1e-6)
    np.testing.assert_allclose(wait(client.pointwise("exp", X, scale=2, shift=1)), np.exp(X) * 2 + 1, rtol=1e-5)
    assert wait(client.pointwise("maximum", X, 0, store="y")).name == "y"


def test_arithmetic_with_handles(client: Any) -> None:
    b = client.tensors["b"]
    np.testing.assert_array_equal(wait(b + 1), B + 1)
    np.testing.assert_array_equal(wait(1 + b), B + 1)
    np.testing.assert_array_equal(wait(b - [1, 2, 3]), B - [1, 2, 3])
    np.testing.assert_array_equal(wait(B - b), B - B)
    np.testing.assert_array_equal(wait(b * 2), B * 2)
    np.testing.assert_array_equal(wait(3 * b), B * 3)
    np.testing.assert_array_equal(wait(b / 2), B / 2)
    np.testing.assert_array_equal(wait(2 / b), 2 / B)
    np.testing.assert_allclose(wait(X @ client.tensors["w"]), X @ W, rtol=1e-5)
    np.testing.assert_array_equal(wait(client.tensors["w"] @ np.eye(3, dtype=np.float32)), W)


def test_descriptions_of_handles(client: Any) -> None:
    w = client.tensors["w"]
    assert repr(w).endswith("Tensor('w')")
    assert wait(w.describe()).shape == w.shape == (6, 3)
    assert "float32" in repr(w)
    assert "18" not in repr(w)
    assert "72 bytes" in w._repr_html_()
    assert [tensor.name for tensor in wait(client.tensors())] == ["w", "b"]
    assert "tilewire.test" in repr(client.tensors) + repr(client.programs)


def test_an_undescribed_handle_of_the_asyncio_client() -> None:
    client = tilewire.AsyncClient("http://tilewire.test", transport=httpx.MockTransport(SpeakingServer()))
    with pytest.raises(RuntimeError, match=r"await handle\.describe\(\)"):
        _ = client.tensors["w"].shape


def test_tensors_are_a_mapping(server: SpeakingServer) -> None:
    client = tilewire.Client("http://tilewire.test", transport=httpx.MockTransport(server))
    client.tensors["new"] = [1, 2]
    assert list(client.tensors) == ["w", "b", "new"]
    assert len(client.tensors) == 3
    assert "new" in client.tensors
    del client.tensors["new"]
    assert "new" not in client.tensors


def test_programs_are_a_mapping(server: SpeakingServer) -> None:
    client = tilewire.Client("http://tilewire.test", transport=httpx.MockTransport(server))
    client.program("mlp", MLP)
    client.program("other", MLP)
    assert list(client.programs) == ["mlp", "other"]
    assert "mlp" in client.programs
    del client.programs["mlp"]
    assert "mlp" not in client.programs
    assert len(client.programs) == 1


def test_the_asyncio_client_says_how_to_list() -> None:
    client: Any = tilewire.AsyncClient("http://tilewire.test", transport=httpx.MockTransport(SpeakingServer()))
    for name in ("tensors", "programs"):
        for use in (lambda things: "w" in things, list):
            with pytest.raises(TypeError, match=rf"type \[one\.name for one in await c\.{name}\(\)\]"):
                use(getattr(client, name))


def check_mlp(got: Any) -> None:
    h = np.maximum(X @ W, 0)
    np.testing.assert_allclose(got.values, -np.sort(-h, axis=-1)[:, :2], rtol=1e-5)
    assert got.indices.dtype == np.int64


def test_programs_are_kept_run_listed_and_removed(client: Any, server: SpeakingServer) -> None:
    mlp = wait(client.program("mlp", MLP))
    assert server.programs["mlp"] == MLP
    assert repr(mlp).endswith("KeptProgram('mlp')")
    check_mlp(wait(mlp(x=X)))
    assert server.requests[-1].headers["x-tilewire-key"] == "mlp"
    again = client.programs["mlp"]
    check_mlp(wait(again(x=X)))
    assert wait(again.describe()) == tilewire.Program.from_dict(MLP)
    check_mlp(wait(again(x=X.tolist())))
    answer = wait(again.run({"x": X}, request_id="mine"))
    check_mlp(answer.result)
    assert server.requests[-1].headers["x-request-id"] == "mine"
    assert [program.name for program in wait(client.programs())] == ["mlp"]
    wait(again.delete())
    with pytest.raises(tilewire.NotFound, match="no program 'mlp'"):
        wait(again(x=X))


def test_a_program_that_is_not_kept(client: Any, server: SpeakingServer) -> None:
    check_mlp(wait(client.run_program(tilewire.Program.from_dict(MLP), {"x": X})).result)
    assert server.requests[-1].url.path == "/v1/run"
    server.tensors["x"] = X
    check_mlp(wait(client.run_program(MLP, {"x": "@x"})).result)
    assert server.requests[-1].headers["x-tilewire-key"] == "x"
    assert server.programs == {}


def test_arrays_of_a_dtype_that_is_not_declared_are_cast(server: SpeakingServer) -> None:
    for kind in (tilewire.Client, tilewire.AsyncClient):
        client: Any = kind("http://tilewire.test", transport=httpx.MockTransport(server), cast="float32")
        wait(client.program("mlp", MLP))
        check_mlp(wait(client.programs["mlp"](x=X.astype(np.float64))))
        check_mlp(wait(client.run_program(MLP, {"x": X.astype(np.float64)})).result)
        half = {**MLP, "inputs": {"x": {"dtype": "float16", "shape": [-1, 6]}}}
        wait(client.program("half", half))
        wait(client.programs["half"](x=X.astype(np.float16)))


def test_lists_take_the_declared_dtypes(client: Any, server: SpeakingServer) -> None:
    wait(client.program("half", {**MLP, "inputs": {"x": {"dtype": "float16", "shape": [-1, 6]}}}))
    num_before = len(server.requests)
    handle = client.programs["half"]
    for _ in range(2):
        wait(handle(x=X.tolist()))
    assert [request.method for request in server.requests[num_before:]] == ["GET", "POST", "POST"]
    wait(client.programs["half"](x=X.astype(np.float16)))
    assert [request.method for request in server.requests[num_before + 3 :]] == ["POST"]
    with pytest.raises(TypeError, match="inputs: expected operands by name"):
        wait(client.run_program(MLP, [X]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": None}, "steps: expected a list"),
        ({"output": "y"}, "program: unknown field 'output'; expected inputs, steps, outputs"),
        (
            {"steps": [{"op": "softmax", "inputs": {"x": "x"}, "option": {"log": True}, "as": "y"}]},
            r"steps\[0\]: unknown field 'option'; expected op, inputs, options, as",
        ),
        ({"inputs": {"x": {"dtype": "float32", "shape": [1], "size": 1}}}, r"inputs\.x: unknown field 'size'"),
        ({"steps": [{"op": "softmax", "inputs": ["x"], "as": "y"}]}, r"steps\[0\]\.inputs: expected an object"),
        ({"steps": [{"op": "softmax", "inputs": {}, "options": [1], "as": "y"}]}, r"steps\[0\]\.options: expected"),
        ({"steps": [{"op": "softmax", "inputs": {}, "as": 3}]}, r"steps\[0\]\.as: expected a name"),
        ({"steps": [{"inputs": {}}]}, r"steps\[0\]: expected an object with op"),
        ({"inputs": []}, "inputs: expected an object"),
        ({"inputs": {"x": {"dtype": "float32"}}}, r"inputs\.x: expected an object with dtype and shape"),
        ({"inputs": {"x": {"shape": [2]}}}, r"inputs\.x: expected an object with dtype and shape"),
        ({"inputs": {"x": "float32"}}, r"inputs\.x: expected an object"),
        ({"outputs": [1]}, "outputs: expected a name"),
    ],
)
def test_programs_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tilewire.Program.from_dict({**MLP, **change})
    with pytest.raises(ValueError, match="program: expected"):
        tilewire.Program.from_dict("x")
    with pytest.raises(ValueError, match="cannot name a program"):
        tilewire.Client().programs["a/b"]


def test_a_program_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mlp.json"
    path.write_text(json.dumps(MLP))
    program = tilewire.Program.read(path)
    assert program.to_dict() == MLP
    assert "<td>topk</td>" in program._repr_html_()


def classify(x: Any) -> Any:
    h = np.maximum(x @ W + B, 0)
    p = np.exp(h) / np.exp(h).sum(-1, keepdims=True)
    return p * 2 - 1


def layers(x: Any) -> Any:
    return (1 - np.tanh(-x) / 4 + abs(x)).mean(-1)


def mixed(x: Any) -> Any:
    return np.maximum(np.minimum(x, 0.5), -0.5) @ W.astype(np.float64)


def changed(x: Any) -> Any:
    w = np.ones(6, np.float32)
    y = x * w
    w *= 10
    return y + w + np.arange(6) + [0.5] * 6


def several(x: Any) -> Any:
    return x - B[0], np.argmax(x, axis=-1), 2.0 / (x * x + 1)


def reduced(x: Any) -> Any:
    last = np.int64(-1)
    norms = np.linalg.norm(x), np.linalg.norm(x, None, 0), np.linalg.norm(x, axis=last, keepdims=True)
    sums = np.sum(x, 1, None, None, True), np.mean(x, axis=0), np.max(x), np.min(x, -1, None, False)
    return *norms, *sums, np.argmin(x, 0, None), np.argmax(x, keepdims=True)


def powers(x: Any) -> Any:
    return x**2 + np.square(x), np.power(x * x + 1, 0.5), (x * x + 1) ** -0.5


def clipped(x: Any) -> Any:
    return np.clip(x, -0.5, 0.5), np.clip(x, None, 0.25), np.clip(x, 0, None)


@pytest.mark.parametrize("function", [classify, layers, mixed, changed, several, reduced, powers, clipped])
def test_recorded_code_computes_what_numpy_does(
    client: Any, server: SpeakingServer, function: Callable[[Any], Any]
) -> None:
    kept = wait(client.trace(function, x=("float32", (-1, 6))))
    assert kept.name == function.__name__
    program = tilewire.Program.from_dict(server.programs[kept.name])
    answer = wait(kept.run({"x": X}))
    expected = function(X)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for name, array in zip(program.outputs, expected, strict=True):
        np.testing.assert_allclose(answer.outputs[name], array, rtol=1e-4, atol=1e-6)
    assert all(array.dtype == np.float32 for array in server.tensors.values())


def test_products_apply_the_activation_behind_them(client: Any, server: SpeakingServer) -> None:
    def net(x: Any) -> Any:
        h = x.matmul("@w", bias="@b")
        return h.sigmoid().softmax()

    kept = wait(client.trace(net, name="net", x=tilewire.InputSpec("float32", (-1, 6))))
    steps = server.programs["net"]["steps"]
    assert [step["op"] for step in steps] == ["matmul", "softmax"]
    assert steps[0]["options"] == {"activation": "sigmoid"}
    h = 1 / (1 + np.exp(-(X @ W + B)))
    np.testing.assert_allclose(wait(kept(x=X)), np.exp(h) / np.exp(h).sum(-1, keepdims=True), rtol=1e-5)


def test_what_is_read_twice_is_not_fused(client: Any, server: SpeakingServer) -> None:
    def net(x: Any) -> Any:
        h = x @ client.tensors["w"]
        return h.relu() + h

    kept = wait(client.trace(net, x=("float32", (-1, 6))))
    np.testing.assert_allclose(wait(kept(x=X)), np.maximum(X @ W, 0) + X @ W, rtol=1e-5)
    assert len(server.programs["net"]["steps"]) == 3


def test_methods_of_recorded_values(client: Any, server: SpeakingServer) -> None:
    def net(x: Any) -> Any:
        values, indices = x.normalize("layer").topk(2)
        found = x.search("@items", 3, metric="dot")
        return values, indices, *found, x.reduce("logsumexp", 0), x.silu(), x.gelu(), x.max(0), x.min(0), x.argmin(0)

    wait(client.trace(net, x=("float32", (-1, 6))))
    program = server.programs["net"]
    assert [step["op"] for step in program["steps"]][:3] == ["normalize", "topk", "search"]
    assert len(program["outputs"]) == 10


def test_ops_without_a_method_of_their_own_are_the_clients(client: Any, server: SpeakingServer) -> None:
    def net(x: Any) -> Any:
        return x.add(x.relu(), alpha=2, out_dtype=np.float32)

    kept = wait(client.trace(net, x=("float32", (-1, 6))))
    assert server.programs["net"]["steps"][1]["options"] == {"alpha": 2, "out_dtype": "float32"}
    np.testing.assert_allclose(wait(kept(x=X)), X + 2 * np.maximum(X, 0), rtol=1e-6)
    with pytest.raises(TypeError, match="store: a step of a program stores nothing"):
        wait(client.trace(lambda x: x.add(x, store="y"), name="stored", x=("float32", (-1, 6))))
    with pytest.raises(AttributeError, match="'Traced' object has no attribute 'delete'"):
        wait(client.trace(lambda x: x.delete("@w"), name="wrong", x=("float32", (-1, 6))))


def test_functions_of_pointwise_are_methods(client: Any) -> None:
    def net(x: Any) -> Any:
        return x.abs().maximum(x).mul(x).exp(), x.tanh(scale=2)

    first, second = wait(wait(client.trace(net, x=("float32", (-1, 6))))(x=X)).values()
    np.testing.assert_allclose(first, np.exp(np.abs(X) * X), rtol=1e-4)
    np.testing.assert_allclose(second, 2 * np.tanh(X), rtol=1e-4)


def test_values_and_indices_come_as_from_the_op(client: Any, server: SpeakingServer) -> None:
    for function in (lambda x: x.softmax().topk(2), lambda x: (x @ client.tensors["w"]).search("@items", 2)):
        server.tensors["items"] = np.eye(3, dtype=np.float32)[:2]
        server.tensors["w"] = W[:, :3]
        found = wait(wait(client.trace(function, name="best", x=("float32", (-1, 6))))(x=X))
        assert isinstance(found, tilewire.TopK)
        assert found.values.shape == found.indices.shape == (len(X), 2)
        assert server.programs["best"]["outputs"] == ["values", "indices"]


def test_results_have_names(client: Any, server: SpeakingServer) -> None:
    def net(x: Any) -> Any:
        h = x.relu()
        return {"hidden": h, "p": h.softmax()}

    found = wait(wait(client.trace(net, x=("float32", (-1, 6))))(x=X))
    np.testing.assert_array_equal(found["hidden"], np.maximum(X, 0))
    np.testing.assert_allclose(found["p"].sum(-1), 1, rtol=1e-5)
    wait(client.trace(lambda x: x.softmax(), name="one", x=("float32", (-1, 6))))
    assert server.programs["one"]["outputs"] == ["out"]
    # A name that an input has already stays with it.
    kept = wait(client.trace(lambda out: out.softmax(), name="taken", out=("float32", (-1, 6))))
    np.testing.assert_allclose(wait(kept(out=X)).sum(-1), 1, rtol=1e-5)
    wrongs: list[tuple[Any, str]] = [
        (lambda x: {"x": x.relu()}, "'x' cannot be the name of a result: it is an input's"),
        (lambda x: {"a": x, "b": x.relu()}, "'a' cannot be the name of a result: the value is the input 'x'"),
        (lambda x: dict.fromkeys(("a", "b"), x.relu()), "'b' cannot be the name of a result: the value is 'a' already"),
        (lambda x: (x.relu(),) * 2, "returns one value twice"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(ValueError, match=message):
            wait(client.trace(wrong, name="wrong", x=("float32", (-1, 6))))


def test_names_of_the_recorder_give_way(client: Any) -> None:
    def net(v0: Any, v2_: Any) -> Any:
        h = v0.relu()
        p = (h + v2_).softmax()
        return {"v1": p, "v2": p.relu(), "v3": h}

    spec = ("float32", (-1, 6))
    found = wait(wait(client.trace(net, v0=spec, v2_=spec))(v0=X, v2_=X))
    np.testing.assert_array_equal(found["v3"], np.maximum(X, 0))
    np.testing.assert_array_equal(found["v1"], found["v2"])
    np.testing.assert_allclose(found["v1"].sum(-1), 1, rtol=1e-5)

    between = wait(client.trace(lambda x: {"v1": x + 1, "v0": (x + 1) * 2}, name="between", x=spec))
    found = wait(between(x=X))
    np.testing.assert_array_equal(found["v1"], X + 1)
    np.testing.assert_array_equal(found["v0"], (X + 1) * 2)


def test_a_default_stands_for_an_argument_without_a_name(client: Any) -> None:
    wait(client.trace(lambda scale=2, /, *, x: x * scale, name="f", x=("float32", (-1, 6))))
    np.testing.assert_array_equal(wait(client.programs["f"].run({"x": X})).result, 2 * X)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: {"y": 3}, "expected it to return recorded values"),
        (lambda x: {}, "expected it to return recorded values"),
        (lambda x: x, "returns its inputs as they are; a program has at least one step"),
        (lambda x: np.sin(x), "no op computes np.sin"),
        (lambda x: np.cumsum(x), "no op computes np.cumsum"),
        (lambda x: x**3, "no op computes the power 3 in a program; those of 2, 0.5 and -0.5"),
        (lambda x: x**x, "no op computes the power "),
        (lambda x: 2**x, "no op computes a power of 2 in a program; np.exp is computed"),
        (lambda x: np.power(2.0, x), "no op computes a power of 2.0 in a program"),
        (lambda x: np.clip(np.zeros(6), x, 1), "np.clip: expected the recorded value as the first argument"),
        (lambda x: np.clip(x, 0, 1, dtype="float16"), "np.clip: no op computes "),
        (lambda x: x + (x == 0), "no op compares"),
        (lambda x: x * (x != 0), "no op compares"),
        (lambda x: np.zeros(6) == x, "no op computes np.equal"),
        (lambda x: x or x, "if and while"),
        (lambda x: 3, "expected it to return recorded values"),
        (lambda x, y: x, "give each argument its type"),
        (lambda x, y, /: x, r"x, y can be given by position only; .*, as lambda x, y: …, and give name='f'"),
        (max, r"a built-in function without names for its inputs; .*, as lambda x: …, and give name='f'"),
        (np.exp, r"x can be given by position only; .*, as lambda x: …, and give name='f'"),
        (lambda x: list(x), "iterable"),
        (lambda x: np.linalg.norm(x, 1), "np.norm: no op computes ord=1 in a program"),
        (lambda x: np.linalg.norm(x, np.inf, -1), "np.norm: no op computes ord=inf"),
        (lambda x: np.linalg.norm(x, ord="fro"), "np.norm: no op computes ord='fro'"),
        (lambda x: np.sum(x, 0, np.float64), "np.sum: no op computes dtype=<class 'numpy.float64'>"),
        (lambda x: np.mean(x, dtype="float64"), "np.mean: no op computes dtype='float64'"),
        (lambda x: np.sum(x, axis=(0, 1)), r"axis: expected an integer, got \(0, 1\)"),
        (lambda x: x.mean((0, 1)), r"axis: expected an integer, got \(0, 1\)"),
        (lambda x: x.softmax(None), "axis: expected an integer, got None"),
        (lambda x: np.max(x, initial=0), "np.max: no op computes initial=0"),
        (lambda x: np.max(x, where=[True] * 6), r"np.max: no op computes where=\[True"),
        (lambda x: np.argmax(x, 0, np.zeros(6, np.intp)), "np.argmax: no op computes out=array"),
        (lambda x: np.sum(np.ones(6), 0, None, x), "np.sum: expected the recorded value as the first argument"),
        (lambda x: np.add(x, x, where=[True] * 6), "no op computes np.add with these arguments"),
    ],
)
def test_code_that_no_op_computes(client: Any, server: SpeakingServer, function: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        wait(client.trace(function, name="f", x=("float32", (-1, 6))))
    assert server.programs == {}


def test_constants_beside_integers(client: Any, server: SpeakingServer) -> None:
    eye, bias = np.eye(6, dtype=np.int8), np.arange(6, dtype=np.int32)

    def net(x: Any) -> Any:
        return x.matmul(eye, bias=bias) + [1] * 6, eye @ x + bias

    wait(client.trace(net, x=("int8", (6, 6))))
    kept = {name: array.dtype.name for name, array in server.tensors.items() if name.startswith("net/")}
    assert [(name.partition("-")[0], dtype) for name, dtype in kept.items()] == [
        ("net/c0", "int8"),
        ("net/c1", "int32"),
        ("net/c2", "int32"),
    ]
    with pytest.raises(TypeError, match="b: a constant of float64 cannot become int32"):
        wait(client.trace(lambda x: (x @ eye) + np.ones(6), name="wrong", x=("int8", (6, 6))))
    with pytest.raises(TypeError, match="b: a constant of int64 cannot become int32"):
        wait(client.trace(lambda x: (x @ eye) + np.full(6, 2**40), name="wrong", x=("int8", (6, 6))))


SPEC = ("float32", (-1, 6))


def test_the_same_bytes_in_another_byte_order_are_another_constant(client: Any) -> None:
    little = np.arange(1, 5, dtype="<f4")
    for factor in (little, little.view(">f4")):
        kept = wait(client.trace(lambda x, by=factor: x * by, name="times", x=("float32", (-1, 4))))
        np.testing.assert_array_equal(wait(kept(x=np.ones((1, 4), np.float32))), factor[None])


def test_a_constant_whose_zeros_change_their_sign_is_another(client: Any, server: SpeakingServer) -> None:
    zeros, odd = np.zeros(6, np.float32), np.full(6, np.nan, np.float32)

    def net(x: Any) -> Any:
        above = x * zeros
        np.negative(zeros, out=zeros)
        return above, x * zeros, (x + odd) * odd

    wait(client.trace(net, x=SPEC))
    # That of NaN is the same one both times.
    above, below, last = (server.tensors[name] for name in sorted(constants(server)))
    assert not np.signbit(above).any()
    assert np.signbit(below).all()
    assert np.isnan(last).all()


def constants(server: SpeakingServer) -> set[str]:
    return {name for name in server.tensors if "/" in name}


def test_constants_are_those_of_the_program_that_is_kept(client: Any, server: SpeakingServer) -> None:
    kept = wait(client.trace(lambda x: x @ W + B, name="net", x=SPEC))
    first, program = constants(server), server.programs["net"]
    assert len(first) == 2
    np.testing.assert_allclose(wait(kept(x=X)), X @ W + B, rtol=1e-5)
    # Refused when it is put, and while its constants are.
    server.refuses = lambda request: request.method == "PUT" and request.url.path.startswith("/v1/programs/")
    with pytest.raises(tilewire.BadRequest, match="refused"):
        wait(client.trace(lambda x: x @ (2 * W) + B, name="net", x=SPEC))
    server.refuses = lambda request: request.method == "PUT" and "/c1-" in request.url.path
    with pytest.raises(tilewire.BadRequest, match="refused"):
        wait(client.trace(lambda x: x @ (2 * W) + 2 * B, name="net", x=SPEC))
    server.refuses = lambda request: False
    assert constants(server) == first
    assert server.programs["net"] == program
    # Replaced: only what differs is sent.
    num_before = len(server.requests)
    wait(client.trace(lambda x: x @ W + 3 * B, name="net", x=SPEC))
    methods = [(request.method, request.url.path.rpartition("-")[0]) for request in server.requests[num_before:]]
    assert [path for method, path in methods if method == "PUT" and path] == ["/v1/tensors/net/c1"]
    assert len(constants(server) & first) == 1
    assert len(constants(server)) == 2
    np.testing.assert_allclose(wait(kept(x=X)), X @ W + 3 * B, rtol=1e-5)
    wait(kept.delete())
    assert constants(server) == set()
    assert set(server.tensors) == {"w", "b"}


def test_a_replaced_program_whose_answer_was_lost_keeps_its_constants(client: Any, server: SpeakingServer) -> None:
    wait(client.trace(lambda x: x @ W, name="net", x=SPEC))
    server.loses = lambda request: request.method == "PUT" and request.url.path.startswith("/v1/programs/")
    with pytest.raises(tilewire.ServerError):
        wait(client.trace(lambda x: x @ (2 * W), name="net", x=SPEC))
    server.loses = lambda request: False
    np.testing.assert_allclose(wait(client.programs["net"](x=X)), X @ (2 * W), rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: x.pointwise("neg", scale=np.float32(2), shift=np.array(1)), 1 - 2 * X),
        (lambda x: x.add(x, alpha=np.int64(2)), 3 * X),
        (lambda x: x.reduce("sum", keepdims=np.bool_(True)), X.sum(keepdims=True)),
    ],
)
def test_options_are_numbers_of_numpy(client: Any, function: Any, expected: Any) -> None:
    np.testing.assert_allclose(wait(wait(client.trace(function, name="f", x=SPEC))(x=X)), expected, rtol=1e-5)


def test_an_option_that_json_lacks_is_named(client: Any) -> None:
    with pytest.raises(TypeError, match="add: alpha: expected a number, a text, True or False; got 2j"):
        wait(client.trace(lambda x: x.add(x, alpha=2j), name="f", x=SPEC))


def test_a_value_of_another_recording_is_no_value_of_this_one(client: Any) -> None:
    kept: list[Any] = []

    def keeping(x: Any) -> Any:
        kept.append(x + 1)
        return x * 2

    wait(client.trace(keeping, name="f", x=SPEC))
    with pytest.raises(TypeError, match="b: a value of another recording"):
        wait(client.trace(lambda x: x + kept[0], name="g", x=SPEC))
    with pytest.raises(TypeError, match="g: returns a value of another recording"):
        wait(client.trace(lambda x: kept[0], name="g", x=SPEC))


def test_division_by_zero_is_that_of_numpy(client: Any) -> None:
    # The server of these tests divides in this process, too.
    with np.errstate(divide="ignore", invalid="ignore"):
        divided = wait(wait(client.trace(lambda x: x / 0, name="f", x=SPEC))(x=X))
        np.testing.assert_array_equal(divided, X / np.float32(0))


@pytest.mark.parametrize("dtype", ["int32", "float64"])
def test_numbers_are_added_to_every_dtype_of_add(client: Any, dtype: str) -> None:
    x = np.array([1, -2, 3], dtype)
    kept = wait(client.trace(lambda x: (x + 2, 2 + x, x - 2, 2 - x), name="f", x=(dtype, (-1,))))
    for found, expected in zip(wait(kept(x=x)).values(), (x + 2, 2 + x, x - 2, 2 - x), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, expected)


def test_code_without_a_name(client: Any, server: SpeakingServer) -> None:
    for function in (lambda x: x.relu(), functools.partial(classify)):
        with pytest.raises(TypeError, match='give name="…"'):
            wait(client.trace(function, x=SPEC))
    with pytest.raises(ValueError, match="cannot name a program"):
        wait(client.trace(lambda x: x @ W, name="a/b", x=SPEC))
    assert constants(server) == set()
    assert wait(client.trace(functools.partial(classify), name="part", x=SPEC)).name == "part"


def test_options_that_json_has_no_number_for(client: Any, server: SpeakingServer) -> None:
    wait(client.trace(lambda x: np.exp(x) + np.inf, name="net", x=("float32", (-1, 6))))
    (_, step) = server.programs["net"]["steps"]
    assert step["options"]["shift"] == "inf"


def test_too_many_steps(client: Any) -> None:
    def deep(x: Any) -> Any:
        for _ in range(33):
            x = np.exp(x)
        return x

    with pytest.raises(ValueError, match="33 steps; a program has at most 32"):
        wait(client.trace(deep, x=("float32", (2,))))


@pytest.mark.parametrize(
    "given", [3, "float32", ("float32", 8), ("float32", (3.7, 8)), ("float32", ("8",)), ("float32",)]
)
def test_types_of_arguments_that_cannot_be(client: Any, given: Any) -> None:
    with pytest.raises(TypeError, match="x: expected dtype and shape"):
        wait(client.trace(abs, name="net", x=given))


def test_bounds_of_bfloat16_values_need_no_import_of_the_users() -> None:
    """In a process of its own: NumPy knows the dtype once anything has imported `ml_dtypes`."""
    code = (
        "import numpy as np; from tilewire._programs.trace import record\n"
        "made = record(lambda x: np.clip(x, -1.5, 2), {'x': ('bfloat16', (-1,))}, 'f')\n"
        "print(sorted((one.dtype, float(one.numpy())) for one in made.constants.values()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "[('bfloat16', -1.5), ('bfloat16', 2.0)]\n", done.stderr


@pytest.mark.parametrize("bias", [np.array([True, False]), [True, False]])
def test_a_mask_is_no_bias_of_recorded_scores(client: Any, bias: Any) -> None:
    with pytest.raises(TypeError, match="bias: booleans exclude no item"):
        wait(client.trace(lambda x: x.search("@items", 2, bias=bias), name="found", x=("float32", (-1, 3))))

"""The console's form and its list of residents in a real browser, before a real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from tests.support.console_load import prepare
from tests.support.console_page import choose, compute, fill, result
from tests.support.live_server import ROOT, LiveServer, path_with
from tests.support.programs import find_program
from tests.support.tensor_bodies import from_safetensors, to_npy, to_safetensors
from tilewire.service.ops.registry import OPS

pytestmark = pytest.mark.slow


def test_two_matrices(page: Page) -> None:
    choose(page, "matmul")
    fill(page, a="1 2 3\n4 5 6", b="7, 8\n9, 10\n11, -1e2")
    compute(page)
    assert result(page) == [["58", "-272"], ["139", "-518"]]
    answer = page.locator("#answer")
    expect(answer).to_contain_text("float32 [2, 2]")
    expect(answer).to_contain_text(re.compile(r"kernel [\d.]+\sms"))
    expect(answer).to_contain_text("alone in its launch")
    page.get_by_label("dtype", exact=True).select_option("bfloat16")
    page.get_by_label("activation").select_option("relu")
    # By the mouse. `compute` does it by the keyboard.
    page.get_by_role("button", name="Compute").click()
    expect(answer).to_contain_text("bfloat16 [2, 2]")
    assert result(page) == [["58", "0"], ["139", "0"]]


@pytest.mark.parametrize(
    ("op", "operands", "options", "expected"),
    [
        ("softmax", {"x": "0 0"}, {}, [["0.5", "0.5"]]),
        ("add", {"a": "1 2", "b": "10\n20"}, {"alpha": "0.5"}, [["6", "7"], ["11", "12"]]),
        ("normalize", {"x": "3 4", "weight": "10 10"}, {"kind": "l2"}, [["6", "8"]]),
        ("reduce", {"x": "1 5 3"}, {"kind": "max", "keepdims": "true"}, [["5"]]),
        ("pointwise", {"x": "1 2", "y": "3 4"}, {"fn": "mul", "shift": "1"}, [["4", "9"]]),
        ("topk", {"x": "1 3 2"}, {"k": "2"}, [["3", "2"]]),
        ("search", {"a": "1 0", "b": "1 0\n0 1\n2 0"}, {"k": "2", "metric": "l2"}, [["0", "1"]]),
    ],
)
def test_every_op_is_in_the_form(
    page: Page, op: str, operands: dict[str, str], options: dict[str, str], expected: list[list[str]]
) -> None:
    choose(page, op)
    if operands.keys() - {"a", "b", "x"}:
        page.get_by_text("Optional inputs").click()
    fill(page, **operands)
    for name, value in options.items():
        field = page.locator(f"#opt-{name}")
        if field.evaluate("one => one.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    compute(page)
    boxes = page.locator("#answer .scroll")
    expect(boxes.first).to_be_visible()
    rows = [row.locator("td").all_inner_texts() for row in boxes.first.locator("tr").all()]
    assert rows == expected
    if op in ("topk", "search"):
        expect(page.locator("#answer")).to_contain_text("indices int64 [1, 2]")


def test_the_form_has_all_ops_and_their_examples_run(page: Page) -> None:
    choose(page, "matmul")
    assert page.locator("#op option").evaluate_all("all => all.map((one) => one.value)")[: len(OPS)] == list(OPS)
    for op in OPS:
        choose(page, op)
        compute(page)
        expect(page.locator("#send")).to_be_enabled()
        expect(page.locator("#answer table.result").first).to_be_visible()
        expect(page.get_by_role("alert")).to_be_empty()


def test_a_kept_program_runs(page: Page, client: httpx.Client) -> None:
    program = {
        "inputs": {"x": {"dtype": "float16", "shape": [-1, 2]}, "shift": {"dtype": "float16", "shape": [2]}},
        "steps": [
            {"op": "add", "inputs": {"a": "x", "b": "shift"}, "as": "moved"},
            {"op": "softmax", "inputs": {"x": "moved"}, "as": "p"},
        ],
        "outputs": ["moved", "p"],
    }
    client.put("/v1/programs/console-try", json=program).raise_for_status()
    try:
        page.reload()
        choose(page, "program:console-try")
        expect(page.locator("#try-note")).to_have_text("2 steps; answers moved, p.")
        fill(page, x="1 2\n3 4", shift="1 0")
        compute(page)
        answer = page.locator("#answer")
        expect(answer).to_contain_text("moved float16 [2, 2]")
        assert result(page)[:2] == [["2", "2"], ["4", "4"]]
        expect(answer.get_by_label("Result p")).to_contain_text("0.5")
    finally:
        client.delete("/v1/programs/console-try").raise_for_status()


def test_special_values_come_back(page: Page) -> None:
    choose(page, "matmul")
    fill(page, a="inf nan", b="1 0\n0 1")
    compute(page)
    assert result(page) == [["NaN", "NaN"]]
    fill(page, a="-inf", b="1")
    compute(page)
    expect(page.locator("#answer table.result")).to_have_text("-∞")


def test_what_the_server_refuses_is_shown_with_its_detail(page: Page) -> None:
    choose(page, "matmul")
    fill(page, a="1 2", b="1\n2\n3")
    compute(page)
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("400 Invalid request")
    expect(problem).to_contain_text("b: its inner dimension is 3, but that of a is 2")
    expect(problem.locator("code")).to_have_text(re.compile(r"^[0-9a-f]{32}$"))
    expect(page.locator("#answer")).to_be_empty()


@pytest.mark.parametrize(
    ("a", "said"),
    [
        ("1 two", "a, row 1: “two” is not a number"),
        ("1 2\n3", "a, row 2 has 1 number, but row 1 has 2"),
        (" ", "a is empty"),
    ],
)
def test_what_is_no_matrix_is_not_sent(page: Page, a: str, said: str) -> None:
    choose(page, "matmul")
    fill(page, a=a, b="1\n2")
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.method))
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text(said)
    expect(page.locator("#in-a")).to_have_attribute("aria-invalid", "true")
    assert "POST" not in sent


def test_a_file_with_both_operands(page: Page) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((12, 5)).astype(np.float16), rng.standard_normal((5, 3)).astype(np.float16)
    choose(page, "matmul")
    page.get_by_label("A file").check()
    fill(page, a="", b="")
    files = {
        "name": "ab.safetensors",
        "mimeType": "application/octet-stream",
        "buffer": to_safetensors({"a": a, "b": b}),
    }
    page.locator("#file").set_input_files(files)  # type: ignore[arg-type]
    compute(page)
    shown = np.array(result(page), dtype=np.float64)
    expect(page.locator("#answer")).to_contain_text("float16 [12, 3]")
    expect(page.locator("#answer")).to_contain_text("The first 8 × 3 of it.")
    np.testing.assert_allclose(shown, (a.astype(np.float64) @ b.astype(np.float64))[:8], rtol=1e-2, atol=1e-2)
    with page.expect_download() as download:
        page.get_by_role("button", name="save as safetensors").click()
    assert download.value.suggested_filename == "out.safetensors"


def test_a_file_against_a_resident(page: Page, server: LiveServer) -> None:
    prepare(server.url)
    choose(page, "matmul")
    page.get_by_label("A file").check()
    buffer = to_npy(np.ones((2, 512), np.float32))
    page.locator("#file").set_input_files({"name": "a.npy", "mimeType": "", "buffer": buffer})
    fill(page, a="", b="@head/vocabulary")
    compute(page)
    expect(page.locator("#answer")).to_contain_text("float32 [2, 2048]")
    fill(page, b="@nothing/there")
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("404")


def test_a_file_that_is_none(page: Page) -> None:
    choose(page, "softmax")
    page.get_by_label("A file").check()
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("Choose a file first")
    page.locator("#file").set_input_files({"name": "x.npy", "mimeType": "", "buffer": b"no array"})
    compute(page)
    expect(page.get_by_role("alert")).to_contain_text("400")


@pytest.mark.parametrize(
    ("op", "operands", "dtype"),
    [
        ("matmul", {"a": "1 2", "b": "3\n4"}, "float32"),
        ("softmax", {"x": "1 -inf"}, "bfloat16"),
        ("search", {"a": "1 0", "b": "1 0\n0 1"}, "float16"),
    ],
)
def test_the_request_runs_as_curl_and_in_python(page: Page, op: str, operands: dict[str, str], dtype: str) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(page, op)
    fill(page, **operands)
    page.get_by_label("dtype", exact=True).select_option(dtype)
    compute(page)
    shown = result(page)[0][0]
    texts = {}
    for title in ("The same with curl", "The same in Python"):
        snippet = page.locator("details.snippet", has_text=title)
        snippet.locator("summary").click()
        snippet.get_by_role("button").click()
        expect(snippet.get_by_role("button")).to_have_text("copied")
        texts[title] = page.evaluate("navigator.clipboard.readText()")
        assert texts[title] == snippet.locator("pre").inner_text()
    find_program("curl")
    text = texts["The same with curl"]
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=30, check=True)
    assert float(np.ravel(next(iter(json.loads(done.stdout).values())))[0]) == float(shown)
    env = {**os.environ, "PYTHONPATH": path_with(ROOT)}
    command = [sys.executable, "-c", texts["The same in Python"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"\b{float(shown):g}\b", done.stdout)


# ── resident tensors ──────────────────────────────────────────────────────────────────────────────


def test_a_tensor_is_uploaded_used_saved_and_deleted(page: Page, client: httpx.Client) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    page.locator("#upload-file").set_input_files({"name": "x.npy", "mimeType": "", "buffer": to_npy(array)})
    page.get_by_label("under the name").fill("console/uploaded")
    page.get_by_role("button", name="Upload", exact=True).click()
    said = page.locator("#residents-said")
    expect(said).to_have_text("console/uploaded is resident.")
    row = page.locator("#residents tbody tr", has_text="console/uploaded")
    expect(row).to_contain_text("[2, 3]")
    choose(page, "add")
    fill(page, a="@console/uploaded", b="@console/uploaded")
    page.get_by_label("Keep the result as").fill("console/sum")
    compute(page)
    expect(page.locator("#answer")).to_contain_text("@console/sum float32 [2, 3], resident")
    with page.expect_download() as download:
        page.get_by_role("button", name="save console/sum").click()
    saved = from_safetensors(download.value.path().read_bytes())
    np.testing.assert_array_equal(saved["console/sum"], 2 * array)
    for name in ("console/sum", "console/uploaded"):
        page.get_by_role("button", name=f"delete {name}").click()
        assert client.head(f"/v1/tensors/{name}").status_code == 200
        page.get_by_role("button", name=f"Really delete {name}?").click()
        expect(said).to_have_text(f"{name} was deleted.")
        assert client.head(f"/v1/tensors/{name}").status_code == 404


def test_an_upload_that_is_refused_says_why(page: Page) -> None:
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.locator("#residents-said")).to_have_text("Choose a file and type a name.")
    page.locator("#upload-file").set_input_files({"name": "x.npy", "mimeType": "", "buffer": b"none"})
    page.get_by_label("under the name").fill("a b")
    page.get_by_role("button", name="Upload", exact=True).click()
    expect(page.locator("#residents-said")).to_contain_text("400 Invalid request: name: ")

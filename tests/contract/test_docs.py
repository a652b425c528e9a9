"""The documents against the code: settings, statuses, metrics, targets, paths and links exist, and README's examples run."""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from benchmarks import break_even
from deploy import client_reference, configuration_reference
from tests.support.live_server import path_with
from tests.support.programs import find_program, free_port
from tests.support.tls_server import make_certificates
from tilewire._cli.commands import COMMANDS
from tilewire._variables import CLIENT_VARIABLES
from tilewire.service.cli.serve import variable_name
from tilewire.service.config.settings import Settings, flag_name
from tilewire.service.dtypes import DTYPES
from tilewire.service.errors import BY_CODE
from tilewire.service.gateway.api.v2.header import read_header
from tilewire.service.gateway.grpc.open_inference_pb2 import DESCRIPTOR
from tilewire.service.ops.program.definition import parse_program
from tilewire.service.ops.registry import OPS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(page for name in ("docs", "examples") for page in ROOT.glob(f"{name}/**/*.md"))])
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
EVERYTHING = "\n".join(TEXTS.values())
README, API, MIGRATING = TEXTS["README.md"], TEXTS["docs/api.md"], TEXTS["docs/migrating-from-triton.md"]

# Pages whose blocks are one program.
SEQUENTIAL = ("docs/tutorial.md",)
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# How the blocks of a language run: file name and commands. Other languages are checked elsewhere, or show what is typed.
LANGUAGES = {
    "bash": ("multiply.sh", ["bash", "multiply.sh"]),
    "javascript": ("multiply.js", ["node", "multiply.js"]),
    "java": ("Multiply.java", ["java", "Multiply.java"]),
    "go": ("multiply.go", ["go", "run", "multiply.go"]),
    "php": ("multiply.php", ["php", "multiply.php"]),
    "ruby": ("multiply.rb", ["ruby", "multiply.rb"]),
}
# `text` is what a program prints, or a signature.
CHECKED = {"text", "console", "sh", "python", "json", "jsonl", "toml"}
# Commands of the pages that are not run here, by how they begin, and why.
NOT_RUN = {
    "git clone": "the tests are in a clone",
    "make ": "its target exists; CI's own command is one",
    "TILEWIRE_PORT=9000 TILEWIRE_DEVICE=cpu make ": "likewise",
    "pip install": "tests/contract/test_dist.py installs the packages, CI the extras",
    "python3 -m venv /opt/tilewire": "installs for the machine; tests/contract/test_dist.py installs into folders of its own",
    "cp deploy/systemd/": "changes the machine; tests/contract/test_systemd_file.py verifies the unit",
    "systemctl ": "likewise",
    "journalctl ": "likewise",
    "docker ": "no daemon; make image-test builds the image with buildah and tries it",
    "perf_analyzer": "tests/integration/test_perf_analyzer.py runs it where it is installed",
    "tilewire precompile": "takes half an hour; tests/kernels/test_precompile.py compiles a few kernels",
    "tilewire tune": "needs a GPU",
    "python deploy/ray/fleet.py": "tests/integration/test_ray.py runs it on a cluster of one machine",
    "python -m tests.support.many_requests": "a measurement; tests/integration/test_many_requests.py runs it smaller",
}
# How others are run: what needs a cluster or a person does without.
TRIED_AS = {"helm install": "helm template", "tilewire top": "tilewire top --count 1"}
# Of other commands than `tilewire serve`.
OTHER_FLAGS = {
    "--check",
    "--json",
    "--help",
    "--version",
    "--repository",
    "--url",
    "--cast",
    "--measure",
    "--metrics-url",
    "--data-binary",
    "--file",
    "--items",
}
DOCUMENTED_URL = "http://127.0.0.1:8000"
DOCUMENTED_GRPC = "127.0.0.1:8001"
ANNOUNCED = re.compile(r"at (https?://\S+)")


def section(text: str, title: str) -> str:
    """The text under a heading of the second level."""
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def first_cells(text: str) -> list[str]:
    """What stands in the first column of a section's tables, without its back-ticks."""
    return re.findall(r"^\| `?([^`|]+?)`? \|", text, re.MULTILINE)


def metrics_of_the_code() -> set[str]:
    """The first argument of every call that makes a metric."""
    return {
        node.args[0].value
        for path in (ROOT / "service").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
        if isinstance(node.args[0].value, str) and re.fullmatch(r"tilewire_[a-z_]+", node.args[0].value)
    }


def targets_of_the_makefile() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


# ── settings ──────────────────────────────────────────────────────────────────────────────────────


def test_configuration_page_is_up_to_date() -> None:
    assert configuration_reference.main(["--check"]) == 0, "run `make docs`"


def test_the_client_reference_is_up_to_date(tmp_path: Path) -> None:
    assert client_reference.main(["--check"]) == 0, "run `make docs`"
    other = tmp_path / "client.md"
    other.write_text(client_reference.page() + " ", encoding="utf-8")
    assert client_reference.main(["--check"], other) == client_reference.EXIT_DIFFERS


def test_the_client_reference_has_every_public_name() -> None:
    import tilewire

    page = TEXTS["docs/client.md"]
    names = [name for name in tilewire.__all__ if name != "__version__"]
    assert [name for name in names if f"`{name}`" not in page and f"### {name}\n" not in page] == []


def test_the_client_reference_leads_to_the_options_that_all_ops_take() -> None:
    page = TEXTS["docs/client.md"]
    assert (
        "Also those of [DtypeOptions](#dtypeoptions)." in page.partition("### MatmulOptions\n")[2].partition("###")[0]
    )
    assert "Also those of [CallOptions](#calloptions)." in page.partition("### SearchOptions\n")[2].partition("###")[0]
    assert "timeout_ms" in page.partition("### CallOptions\n")[2].partition("###")[0]


def test_the_table_of_when_it_is_worth_it_is_computed_from_the_results() -> None:
    assert break_even.page_of(break_even.read(break_even.RESULTS)) in TEXTS["docs/worth-it.md"], "run `make docs`"


def test_a_page_that_differs_is_noticed(tmp_path: Path) -> None:
    other = tmp_path / "configuration.md"
    assert configuration_reference.main(["--check"], other) == configuration_reference.EXIT_DIFFERS
    other.write_text(configuration_reference.page() + " ", encoding="utf-8")
    assert configuration_reference.main(["--check"], other) == configuration_reference.EXIT_DIFFERS


def test_settings_in_the_documents_exist() -> None:
    switches = {name for name, field in Settings.model_fields.items() if field.annotation is bool}
    flags = {flag_name(name) for name in Settings.model_fields} | {flag_name(f"no_{name}") for name in switches}
    variables = {variable_name(name) for name in Settings.model_fields} | set(CLIENT_VARIABLES)
    assert set(re.findall(r"`(--[a-z-]+)", EVERYTHING)) - OTHER_FLAGS <= flags
    assert set(re.findall(r"TILEWIRE_[A-Z_]+[A-Z]", EVERYTHING)) <= variables


def test_help_names_every_variable_and_default() -> None:
    command = [sys.executable, "-P", "-m", "tilewire", "serve", "--help"]
    environment = {**os.environ, "COLUMNS": "400", "TERMINAL_WIDTH": "400", "NO_COLOR": "1"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment).stdout
    for name in Settings.model_fields:
        assert flag_name(name) in shown
        assert f"env: {variable_name(name)})" in shown
    kinds = {"port": "<integer>", "arena-bytes": "<size>", "max-batch-ms": "<number>", "store": "<path>"}
    for name, kind in {**kinds, "warmup": "<none|load|run>"}.items():
        assert re.search(rf"--{name} +{re.escape(kind)} ", shown), name
    assert "<str>" not in shown


def test_commands_in_the_documents_exist() -> None:
    named = set(re.findall(r"`tilewire ([a-z][a-z-]*)", EVERYTHING))
    typed = [command for _, commands in shell_blocks() for command in commands]
    named |= {found[1] for command in typed if (found := re.match(r"tilewire ([a-z][a-z-]*)", command))}
    assert named
    assert named <= set(COMMANDS)


# ── statuses and metrics ──────────────────────────────────────────────────────────────────────────


def test_statuses_are_those_of_the_error_tree() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", section(API, "Statuses"), re.MULTILINE)
    assert sorted(rows) == sorted((str(error.status), code) for code, error in BY_CODE.items())


def test_metrics_are_those_of_the_code() -> None:
    documented = [cell for cell in first_cells(section(API, "Metrics")) if cell.startswith("tilewire_")]
    assert len(documented) == len(set(documented))
    assert set(documented) == metrics_of_the_code()


def test_metrics_anywhere_in_the_documents_exist() -> None:
    assert set(re.findall(r"\btilewire_[a-z_]+[a-z]", EVERYTHING)) <= metrics_of_the_code()


def test_troubleshooting_agrees_with_the_readme() -> None:
    assert "No shape ever waits" in README
    assert Settings.model_fields["warmup"].default == "run"
    rows = [row for row in section(TEXTS["docs/operations.md"], "Troubleshooting").splitlines() if "is compiled" in row]
    assert rows
    assert all("`--warmup none`" in row for row in rows)


# ── targets, paths, links ─────────────────────────────────────────────────────────────────────────


def test_make_targets_in_the_documents_exist() -> None:
    named = set(re.findall(r"(?:`|^|^    |DEVICE=\S+ )make (?:[A-Z]+=\S+ )?([a-z-]+)", EVERYTHING, re.MULTILINE))
    assert {"serve", "test"} <= named
    assert named <= targets_of_the_makefile()


def test_contributing_lists_every_target() -> None:
    listed = set(re.findall(r"^\| `make ([a-z-]+)` \|", TEXTS["CONTRIBUTING.md"], re.MULTILINE))
    assert listed == targets_of_the_makefile()


def test_paths_in_the_documents_exist() -> None:
    named = re.findall(r"`((?:service|kernels|tilewire|tests|docs|constraints)/[\w./]*)`", EVERYTHING)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", TEXTS)
def test_relative_links_resolve(page: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", TEXTS[page])
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target.read_text(encoding="utf-8")), link


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ── examples ──────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    """A real server, as a person starts it, with what the examples ask for."""
    with serving(["--allow-shared-memory", "--grpc-port", str(grpc_port())], ROOT) as url:
        yield url


@contextlib.contextmanager
def serving(flags: list[str], folder: Path) -> Iterator[str]:
    """A server that has started with these flags, at a free port; it must drain cleanly."""
    command = [sys.executable, "-P", "-m", "tilewire", "serve", *flags]
    command += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--arena-bytes", "64MiB"]
    # A spare engine would import torch beside each test.
    env = {**os.environ, "PYTHONPATH": path_with(ROOT), "TILEWIRE_SPARE_ENGINE": "false"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder, env=env) as process:
        assert process.stdout is not None
        try:
            announced = next((found for line in process.stdout if (found := ANNOUNCED.search(line))), None)
            assert announced is not None, "the server ended before it was ready"
            yield announced[1]
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(60)
    assert status == 0


@functools.cache
def grpc_port() -> int:
    """The port of gRPC that the examples' server has."""
    return free_port()


def python_blocks() -> list[tuple[str, str]]:
    """Every Python block of every page, by its place; those of a sequential page together."""
    found = []
    for page, text in TEXTS.items():
        blocks = [block for language, block in FENCE.findall(text) if language == "python"]
        if page in SEQUENTIAL:
            found.append((page, "\n".join(blocks)))
        else:
            found += [(f"{page}-{number}", block) for number, block in enumerate(blocks, 1)]
    return found


def shell_blocks() -> list[tuple[str, list[str]]]:
    """The commands of every shell block and terminal of every page, by its place."""
    found = []
    for page, text in TEXTS.items():
        blocks = [block for language, block in FENCE.findall(text) if language == "sh"]
        for number, block in enumerate(blocks, 1):
            lines = block.replace("\\\n", " ").splitlines()
            found.append((f"{page}-{number}", [line for line in lines if line and not line.startswith("#")]))
        terminals = [block for language, block in FENCE.findall(text) if language == "console"]
        typed = [line[2:] for block in terminals for line in block.splitlines() if line.startswith("$ ")]
        found += [(f"{page}-terminal", typed)] if typed else []
    return found


def is_run(command: str) -> bool:
    return not command.startswith(tuple(NOT_RUN))


def at(text: str, server_url: str) -> str:
    """An example with the server's address; Triton's client is given one without its scheme."""
    text = text.replace(DOCUMENTED_GRPC, f"127.0.0.1:{grpc_port()}").replace(DOCUMENTED_URL, server_url)
    return text.replace(DOCUMENTED_URL.removeprefix("http://"), server_url.removeprefix("http://"))


@pytest.mark.parametrize("block", [pytest.param(block, id=place) for place, block in python_blocks()])
def test_python_of_the_documents_runs(block: str, server_url: str, tmp_path: Path) -> None:
    assert "assert" in block
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", at(block, server_url)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path_with(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example shows something"


@pytest.mark.parametrize("language", LANGUAGES)
def test_other_languages_multiply(language: str, server_url: str, tmp_path: Path) -> None:
    name, command = LANGUAGES[language]
    # CI has some of the languages; that one is missing is no failure there.
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    blocks = [block for found, block in FENCE.findall(TEXTS["docs/languages.md"]) if found == language]
    assert len(blocks) == 1
    (tmp_path / name).write_text(at(blocks[0], server_url), encoding="utf-8")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "19 22 43 50"


@pytest.mark.parametrize("page", TEXTS)
def test_every_block_has_a_language_that_is_checked(page: str) -> None:
    text, blocks = TEXTS[page], FENCE.findall(TEXTS[page])
    assert 2 * len(blocks) == len(re.findall(r"^ *```", text, re.MULTILINE)), "a fence has no language"
    assert re.findall(r"\n\n {4}\S.*", FENCE.sub("", text)) == [], "code stands in fences"
    assert {language for language, _ in blocks} <= CHECKED | set(LANGUAGES)
    for language, block in blocks:
        if language == "json":
            json.loads(block)
        elif language == "jsonl":
            assert [json.loads(line) for line in block.splitlines()]
        elif language == "toml":
            tomllib.loads(block)


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    typed = [command for _, commands in shell_blocks() for command in commands]
    assert [start for start in (*NOT_RUN, *TRIED_AS) if not any(one.startswith(start) for one in typed)] == []
    named = [word for reason in NOT_RUN.values() for word in reason.split() if word.startswith("tests/")]
    assert [path for path in named if not (ROOT / path).exists()] == []


def command_tests() -> Iterator[object]:
    for place, commands in shell_blocks():
        ours = [command for command in commands if is_run(command)]
        starts = any(command.startswith("tilewire serve") for command in ours)
        if ours:
            yield pytest.param(ours, id=place, marks=[pytest.mark.slow] if starts else [])


@pytest.fixture
def shell(server_url: str, tmp_path: Path) -> dict[str, str]:
    """The environment of a user's shell: the commands are installed, and the folder holds the files that pages speak of."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "tilewire").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m tilewire "$@"\n', encoding="utf-8")
    (folder / "tilewire").chmod(0o755)
    (folder / "python").symlink_to(sys.executable)
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    np.save(tmp_path / "w.npy", np.ones((3, 4), np.float32))
    make_certificates(tmp_path)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": path_with(ROOT), "TILEWIRE_URL": server_url}


@pytest.mark.slow
@pytest.mark.parametrize("commands", list(command_tests()))
def test_commands_of_the_documents_run(
    commands: list[str], server_url: str, shell: dict[str, str], tmp_path: Path
) -> None:
    for command in commands:
        if command.startswith("tilewire serve"):
            flags = shlex.split(command)[2:]
            flags += ["--grpc-port", str(free_port())] if "--grpc-port" in flags else []
            with serving(flags, tmp_path) as url:
                assert url.startswith("https://" if "--tls-key" in flags else "http://")
            continue
        find_program(command.split()[0]) if command.startswith(("curl", "helm")) else None
        start = next((start for start in TRIED_AS if command.startswith(start)), "")
        typed = at(TRIED_AS.get(start, "") + command.removeprefix(start), server_url)
        done = subprocess.run(
            ["bash", "-c", typed], cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stderr
        for name in re.findall(r"-o (\S+\.npy)", typed):
            np.testing.assert_array_equal(np.load(tmp_path / name).shape[0], 2)


def test_the_first_line_about_grpc_says_what_was_measured() -> None:
    page = TEXTS["docs/grpc.md"]
    result = json.loads((ROOT / "benchmarks/results/grpc.json").read_text(encoding="utf-8"))
    assert page.splitlines()[2].startswith(
        f"gRPC takes {result['ratios']['cpu_grpc_to_http']} times the CPU time of HTTP"
    )
    for one in result["medians"]:
        assert f"| {one['server']} | {one['per_s']:,.0f} |" in page


def test_the_calls_about_grpc_are_those_of_the_service() -> None:
    named = set(re.findall(r"`([A-Z]\w+)`", section(TEXTS["docs/grpc.md"], "Calls")))
    (service,) = DESCRIPTOR.services_by_name.values()
    methods = {one.name for one in service.methods}
    assert methods - named == {name for name in methods if name.endswith(("Register", "Unregister"))}


def test_the_infer_request_of_the_api_is_one() -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```", section(API, "Open Inference Protocol"), re.MULTILINE | re.DOTALL)
    request = read_header(OPS["matmul"], example.encode())
    assert [one.input.name for one in request.pending] == ["a", "b"]


def test_the_program_of_the_api_is_one() -> None:
    (example,) = re.findall(r"^```json\n(.*?)^```", section(API, "Programs"), re.MULTILINE | re.DOTALL)
    program = parse_program(example, OPS)
    assert program.outputs == ("values", "indices")
    assert program.residents == ("mlp/w1", "mlp/b1", "mlp/w2")


def test_options_of_the_api_are_those_of_the_ops() -> None:
    table = section(API, "Ops").partition("\n\n| option |")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \|(.*?)\| .*\|$", table, re.MULTILINE))
    documented = {name: set(re.findall(r"`(\w+)`", options)) for name, options in rows.items()}
    assert documented == {name: set(op.options.__struct_fields__) for name, op in OPS.items()}


def test_the_dtypes_of_the_api_are_those_that_are_served() -> None:
    (line,) = re.findall(r"^- Dtypes that bodies carry .*?:\n? +(.*?):", API, re.MULTILINE | re.DOTALL)
    taken, _, refused = line.partition(". Others")
    assert taken.split(", ") == list(DTYPES)
    assert re.findall(r"(?:bool|u?int)\d*", refused) == ["bool", "int16", "uint8", "uint16", "uint32", "uint64"]
    assert DTYPES.keys().isdisjoint(refused.replace(",", "").split())


def test_curl_of_the_readme_gives_the_answer_shown(server_url: str) -> None:
    find_program("curl")
    examples = re.findall(r"^\$ (curl .+)\n(.+)$", README, re.MULTILINE)
    assert examples
    for command, answer in examples:
        shown = subprocess.run(
            command.replace(DOCUMENTED_URL, server_url), shell=True, capture_output=True, text=True, check=True
        )
        assert shown.stdout.strip() == answer


def test_the_server_shows_documented_metrics_only(server_url: str) -> None:
    shown = set(re.findall(r"^# TYPE (\S+)", httpx.get(f"{server_url}/metrics").text, re.MULTILINE))
    assert "tilewire_build_info" in shown
    assert shown <= set(first_cells(section(API, "Metrics")))


def test_paths_of_the_api_answer(server_url: str) -> None:
    for path in re.findall(r"`(/[\w./]*)`", section(API, "Other paths")):
        assert httpx.get(f"{server_url}{path}", follow_redirects=True).status_code == 200, path

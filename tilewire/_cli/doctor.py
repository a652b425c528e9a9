"""`tilewire doctor`: what this machine lacks to serve, and what to type. Changes nothing and starts nothing."""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from tilewire._cli.session import EXIT_FAILED, JsonOption, print_json
from tilewire._installing import how_to_install
from tilewire._version import __version__

Verdict = Literal["ok", "warning", "wrong"]

OLDEST_PYTHON = (3, 11)
# As the extra `server` has it.
TORCH_VERSIONS = ((2, 11), (2, 14))
TRITON_VERSIONS = ((3, 6), (3, 8))
# Connections, arenas and kernels' files of one process.
MIN_FILES = 4096
# Two arenas of the smallest useful size.
MIN_SHARED_BYTES = 2**28
MIN_MEMORY_BYTES = 4 * 2**30
DEFAULT_PORT = 8000
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  (not a place for files)
_COMMAND_TIMEOUT_S = 20.0
_MARKS: dict[Verdict, str] = {
    "ok": "[green]ok     [/green]",
    "warning": "[yellow]warning[/yellow]",
    "wrong": "[red]wrong  [/red]",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: Its name.
        verdict: Whether it is in order.
        detail: State of it.
        remedy: Command or change that mends it; empty where nothing is to be done.
    """

    what: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def doctor(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port that the server would take.")] = DEFAULT_PORT,
    is_json: JsonOption = False,
) -> None:
    """Look at this machine: GPU, driver, torch, Triton, compiler, memory, limits, port; say what is wrong and what to type."""
    findings = list(examine(port))
    if is_json:
        print_json([asdict(finding) for finding in findings])
    else:
        console = Console()
        for finding in findings:
            console.print(f"{_MARKS[finding.verdict]} {finding.what}: {escape(finding.detail)}", soft_wrap=True)
            if finding.remedy:
                console.print(f"        → {escape(finding.remedy)}", soft_wrap=True)
    if any(finding.verdict == "wrong" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def examine(port: int) -> Iterator[Finding]:
    """Looks at everything, one after the other."""
    yield _python()
    if sys.platform != "linux":
        # Nothing mends that, and the rest is read from places of Linux.
        return
    yield _packages()
    torch = _import("torch")
    yield _torch(torch)
    yield from _gpus(torch)
    yield _compiler(bool(torch is not None and torch.cuda.is_available()))
    yield _shared_memory()
    yield _memory()
    yield _files()
    yield _port(port)


def _python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}, tilewire {__version__}, {platform.platform()}"
    if sys.platform != "linux":
        return Finding("python", "wrong", detail, "the server needs Linux; the client and these commands work here")
    is_new = sys.version_info >= OLDEST_PYTHON
    return Finding("python", "ok" if is_new else "wrong", detail, "" if is_new else "install Python 3.11 or newer")


def _packages() -> Finding:
    try:
        names = [
            requirement.partition(";")[0].strip()
            for requirement in importlib.metadata.requires("tilewire") or ()
            if 'extra == "server"' in requirement
        ]
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "warning", "tilewire itself is not installed", how_to_install("server"))
    plain = [re.split(r"[^\w.-]", name, maxsplit=1)[0] for name in names]
    missing = [name for name in plain if not _is_installed(name)]
    if missing:
        return Finding("packages", "wrong", f"missing: {', '.join(missing)}", how_to_install("server"))
    return Finding("packages", "ok", f"{len(plain)} of the server's are there")


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _torch(torch: Any) -> Finding:
    if torch is None:
        return Finding("torch", "wrong", "not installed, or it cannot be imported", how_to_install("server"))
    oldest, first_not = TORCH_VERSIONS
    built = (
        f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else f"ROCm {torch.version.hip}"
        if torch.version.hip
        else "CPU"
    )
    detail = f"{torch.__version__}, built for {built}"
    if not oldest <= _version_of(torch.__version__) < first_not:
        wanted = f"torch>={_dotted(oldest)},<{_dotted(first_not)}"
        return Finding("torch", "wrong", f"{detail}; tried with {wanted} only", f"pip install '{wanted}'")
    return Finding("torch", "ok", detail)


def _gpus(torch: Any) -> Iterator[Finding]:
    is_nvidia, is_amd = _has_nvidia(), Path("/dev/kfd").exists()
    if torch is not None and torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = f"{properties.total_memory / 2**30:.0f} GiB"
            yield Finding(f"cuda:{index}", "ok", f"{properties.name}, {memory}, driver {_driver() or 'unknown'}")
        yield _triton()
        return
    if not is_nvidia and not is_amd:
        yield Finding("gpu", "warning", "none in this machine: the server computes on the CPU")
        return
    kind = "an NVIDIA" if is_nvidia else "an AMD"
    if torch is not None and not torch.version.cuda and not torch.version.hip:
        build = "CUDA" if is_nvidia else "ROCm"
        remedy = f"install a {build} build of torch: pip uninstall torch, then as https://pytorch.org says"
        yield Finding("gpu", "wrong", f"{kind} GPU, but torch is built for the CPU", remedy)
    elif is_amd and not os.access("/dev/kfd", os.R_OK | os.W_OK):
        remedy = "add this user to the groups video and render, or start the container with --device /dev/kfd --device /dev/dri"
        yield Finding("gpu", "wrong", "an AMD GPU that this user may not open", remedy)
    else:
        yield Finding(
            "gpu",
            "wrong",
            f"{kind} GPU that torch cannot use: {_reason(torch)}",
            "look at nvidia-smi or rocm-smi: the driver may be older than torch needs",
        )


def _triton() -> Finding:
    triton = _import("triton")
    oldest, first_not = TRITON_VERSIONS
    if triton is None:
        return Finding("triton", "wrong", "not installed", "reinstall torch: its GPU builds bring Triton")
    is_known = oldest <= _version_of(triton.__version__) < first_not
    remedy = "" if is_known else "install the torch that the server extra names; it brings its Triton"
    return Finding("triton", "ok" if is_known else "warning", triton.__version__, remedy)


def _compiler(is_needed: bool) -> Finding:
    found = next(
        (path for name in (os.environ.get("CC", ""), "gcc", "clang") if name and (path := shutil.which(name))), None
    )
    if found:
        return Finding("compiler", "ok", found)
    remedy = "apt-get install gcc libc6-dev, or set CC"
    detail = "none: Triton compiles its launchers in C"
    return Finding("compiler", "wrong" if is_needed else "warning", detail, remedy if is_needed else "")


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError as error:
        return Finding(
            "shared memory", "warning", f"{SHARED_MEMORY}: {error.strerror}", f"mount a tmpfs at {SHARED_MEMORY}"
        )
    is_enough = free >= MIN_SHARED_BYTES
    remedy = (
        ""
        if is_enough
        else "docker run --shm-size=2g, or a larger emptyDir of medium Memory; only libraries and --allow-shared-memory use it"
    )
    return Finding(
        "shared memory", "ok" if is_enough else "warning", f"{free / 2**20:,.0f} MiB free in {SHARED_MEMORY}", remedy
    )


def _memory() -> Finding:
    # Windows has no such module.
    import resource  # noqa: PLC0415

    available = _available_bytes()
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:,.0f} MiB"
    detail = f"{available / 2**30:,.1f} GiB available, locked memory up to {limit}"
    if available < MIN_MEMORY_BYTES:
        return Finding(
            "memory",
            "warning",
            detail,
            "serve with smaller arenas: tilewire serve --arena-bytes 512MiB --max-body-bytes 64MiB",
        )
    return Finding("memory", "ok", detail)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _files() -> Finding:
    import resource  # noqa: PLC0415

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{soft:,} open files for each process, {hard:,} at most"
    if soft >= MIN_FILES or hard >= MIN_FILES:
        # The server raises its own limit to the hard one.
        return Finding("limits", "ok", detail)
    return Finding(
        "limits",
        "warning",
        detail,
        f"ulimit -n {MIN_FILES}, or LimitNOFILE={MIN_FILES} in the unit: each connection is a file",
    )


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                remedy = (
                    "tilewire serve --port 0 takes a free one; tilewire health says whether a Tilewire answers there"
                )
                return Finding("port", "wrong", f"{port} is taken", remedy)
            return Finding(
                "port",
                "wrong",
                f"{port}: {error.strerror}",
                "ports below 1024 are for root: tilewire serve --port 8000",
            )
    return Finding("port", "ok", f"{port} is free")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    # A broken torch fails in more ways than by its absence.
    except (ImportError, OSError, RuntimeError):
        return None


def _version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+", maxsplit=1)[0].split(".")[:2] if part.isdecimal())


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()


def _driver() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)  # noqa: S603
    return done.stdout.partition("\n")[0].strip()


def _reason(torch: Any) -> str:
    if torch is None:
        return "torch is not there"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return "no reason given"

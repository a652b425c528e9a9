"""Makes the virtual environment that `make` and the container image use, with the torch that fits. Standard library only.

Owns the choice of torch: a GPU build that the interpreter already has is reused as it is, CUDA or ROCm; a machine without a GPU
gets the CPU build at the versions of `constraints/cpu.txt`; a machine with an NVIDIA GPU and no torch gets the newest build
that `pyproject.toml` allows. In an image, whose build sees no GPU, whatever torch the interpreter has is reused and all else is
pinned. Knows no setting of the service.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
CPU_CONSTRAINTS = ROOT / "constraints" / "cpu.txt"
# Where PyTorch publishes its CPU builds: on Linux the default index has CUDA builds only, of several gigabytes.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

PROBE = """
import json, site, sys
try:
    import torch
    gpu = bool(torch.version.cuda or torch.version.hip) and torch.cuda.is_available()
    versions = {"torch": torch.__version__}
    try:
        import triton
        versions["triton"] = triton.__version__
    except ImportError:
        pass
except ImportError:
    gpu, versions = False, {}
print(json.dumps({"gpu": gpu, "versions": versions, "packages": site.getsitepackages()}))
"""


def main() -> None:
    """Makes or completes the environment."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment is")
    parser.add_argument("--extra", default="server", choices=["server", "dev"], help="what to install")
    parser.add_argument("--image", action="store_true", help="for a container: copied, pinned, no GPU needed now")
    arguments = parser.parse_args()
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"Tilewire needs Python 3.11 or newer; this is {platform.python_version()}. Try: make PYTHON=python3.12"
        )
    found = probe()
    python = arguments.venv / "bin" / "python"
    if not python.exists():
        print(f"making {arguments.venv}")
        venv.create(arguments.venv, with_pip=True, symlinks=True)
    options = image_options(found, python) if arguments.image else choose_torch(found, python)
    # A GPU torch has a Triton of its own, under another name on ROCm; a second one beside it would break both.
    extras = "dev,triton" if arguments.extra == "dev" and not found["gpu"] else arguments.extra
    if arguments.image:
        # Nobody installs anything into a running image: what a setting may ask for is there.
        extras += ",grpc,otel"
    project = [f"{ROOT}[{extras}]"] if arguments.image else ["--editable", f"{ROOT}[{extras}]"]
    command = [str(python), "-m", "pip", "install", "--quiet", *options, *project]
    print("installing:", " ".join(command[4:]))
    subprocess.run(command, check=True, cwd=ROOT)


def probe() -> dict[str, object]:
    """What torch the interpreter that runs this has, and whether it sees a GPU."""
    result = subprocess.run([sys.executable, "-c", PROBE], check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(result.stdout)
    return found


def choose_torch(found: dict[str, object], python: Path) -> list[str]:
    """Options for pip that lead to the right torch."""
    if found["gpu"]:
        return reuse(found, python)
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0:
        print("an NVIDIA GPU and no torch: installing a CUDA build")
        return []
    if Path("/dev/kfd").exists():
        sys.exit("an AMD GPU and no torch: install a ROCm build of torch for this Python first, then run make again")
    return cpu_options(python)


def image_options(found: dict[str, object], python: Path) -> list[str]:
    """Options for pip in an image: the base's torch if it has one, and the pins of everything else."""
    if not found["versions"]:
        return cpu_options(python)
    options = reuse(found, python)
    reused = found["versions"]
    assert isinstance(reused, dict)
    pins = [line for line in CPU_CONSTRAINTS.read_text().splitlines() if line.partition("==")[0] not in reused]
    others = python.parent.parent / "other-constraints.txt"
    others.write_text("\n".join(pins) + "\n")
    return [*options, "--constraint", str(others)]


def cpu_options(python: Path) -> list[str]:
    """Options for pip that lead to the CPU build of torch."""
    options = ["--constraint", str(CPU_CONSTRAINTS)]
    if platform.system() == "Linux" and not is_pip_configured(python):
        options += ["--extra-index-url", TORCH_CPU_INDEX]
    return options


def reuse(found: dict[str, object], python: Path) -> list[str]:
    """Lets the environment see the interpreter's own packages, and keeps pip from replacing its torch."""
    versions, packages = found["versions"], found["packages"]
    assert isinstance(versions, dict)
    assert isinstance(packages, list)
    print("reusing", ", ".join(f"{name} {version}" for name, version in versions.items()))
    site_packages = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    # A .pth file rather than --system-site-packages: that one skips the packages of an interpreter in a venv of its own.
    Path(site_packages, "tilewire-torch.pth").write_text("\n".join(packages) + "\n")
    pins = python.parent.parent / "torch-constraints.txt"
    pins.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
    return ["--constraint", str(pins)]


def is_pip_configured(python: Path) -> bool:
    """Whether the user told pip where packages come from; then that is where they come from."""
    if any(name in os.environ for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX")):
        return True
    listed = subprocess.run(
        [str(python), "-m", "pip", "config", "list"], check=False, capture_output=True, text=True
    ).stdout
    return any(word in listed for word in ("index-url", "find-links", "no-index"))


if __name__ == "__main__":
    main()

"""Builds the sdist and the wheel, and tries both as users get them: `make dist`. Publishes nothing.

Owns the checks of a release; `make` lists them. Needs pip's index for tools. Runs in the environment of the Makefile, whose
packages the check of the server borrows.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Folders whose files the wheel holds, and what they are called there.
PACKAGED = {"tilewire": "tilewire", "service": "tilewire/service", "kernels": "tilewire/kernels"}
# Hugging Face's `kernels`, which transformers uses: a package of the same name as one of our folders.
NEIGHBOUR = "kernels"
NEIGHBOUR_WORKS = "import kernels; print(kernels.get_kernel.__name__)"
MISLEADING = {
    "queue.py": "raise SystemExit('the folder of the command was imported')\n",
    "tilewire.py": "raise SystemExit('the folder of the command was imported')\n",
    "service/__init__.py": "raise SystemExit('the folder of the command was imported')\n",
    "kernels/__init__.py": "raise SystemExit('the folder of the command was imported')\n",
}
ANNOUNCED = re.compile(r"at (http://\S+)")
STOP_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 30
_RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


class Wrong(Exception):
    """A check failed; the message says what is wrong."""


def main(argv: list[str] | None = None) -> int:
    """Builds and checks.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where sdist and wheel go")
    parser.add_argument("--repository", help="address of the repository, for the metadata and for absolute links")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tilewire-dist-") as folder:
        try:
            made = make(Path(folder), arguments.repository)
        except (Wrong, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", None) or getattr(error, "stdout", None) or ""
            print(f"dist: {error}\n{said}".rstrip(), file=sys.stderr)
            return 1
        arguments.out.mkdir(parents=True, exist_ok=True)
        for path in made:
            shutil.copy2(path, arguments.out)
            print(arguments.out / path.name)
    return 0


def make(folder: Path, repository: str | None) -> tuple[Path, Path]:
    """Builds in a folder and runs every check.

    Args:
        folder: Empty.
        repository: Address of the repository, or None to leave links relative.

    Returns:
        The sdist and the wheel.

    Raises:
        Wrong: A check failed.
    """
    tree = folder / "tree"
    files = export(ROOT, tree)
    if repository is not None:
        point_to(tree, repository.rstrip("/"))
    else:
        print(
            "dist: without --repository the pictures and links of the README stay relative, and no URL is in the metadata"
        )
    tools = make_environment(folder / "tools")
    run(tools, "-m", "pip", "install", "--quiet", "build", "twine")
    run(tools, "-m", "build", "--outdir", str(folder / "built"), str(tree))
    sdist, wheel = one(folder / "built", "*.tar.gz"), one(folder / "built", "*.whl")
    run(tools, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder / "direct"), str(tree))
    checks: dict[str, Callable[[], None]] = {
        "every file is in the sdist, none as a link": lambda: check_sdist(sdist, files),
        "every module and asset is in the wheel": lambda: check_wheel(wheel, files),
        "the sdist builds the wheel that the tree builds": lambda: check_same(wheel, one(folder / "direct", "*.whl")),
        "the metadata is right and the README renders": lambda: check_metadata(tools, sdist, wheel),
        "the client installs alone": lambda: check_client(folder / "client", wheel),
        f"the package {NEIGHBOUR} beside it is left alone": lambda: check_neighbour(folder / "neighbour", wheel),
        "the wheel serves from a folder of misleading names": lambda: check_server(folder / "server", wheel),
    }
    for name, check in checks.items():
        check()
        print(f"ok: {name}", flush=True)
    return sdist, wheel


def export(root: Path, tree: Path) -> list[str]:
    """Copies the files of a checkout, without those that git ignores; links stay links.

    Returns:
        The paths of the files, links left out.
    """
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    names = sorted({name for name in listed.split("\0") if name and os.path.lexists(root / name)})
    for name in names:
        target = tree / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, target, follow_symlinks=False)
    return [name for name in names if not (root / name).is_symlink()]


def point_to(tree: Path, repository: str) -> None:
    """Makes the README's links absolute, and names the repository in the metadata: an index page has no files beside it."""
    readme = tree / "README.md"
    readme.write_text(absolute_links(readme.read_text(encoding="utf-8"), repository), encoding="utf-8")
    project = tree / "pyproject.toml"
    pages = {
        "Repository": "",
        "Issues": "/issues",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Documentation": "/tree/main/docs",
    }
    lines = "".join(f'{name} = "{repository}{path}"\n' for name, path in pages.items())
    text = project.read_text(encoding="utf-8")
    if "[project.urls]" in text:
        raise Wrong("pyproject.toml has [project.urls] already: --repository is for when it has none")
    project.write_text(
        text.replace("[project.scripts]", f"[project.urls]\n{lines}\n[project.scripts]", 1), encoding="utf-8"
    )


def absolute_links(text: str, repository: str) -> str:
    """Returns a text whose relative links and pictures are addresses."""
    return _RELATIVE_LINK.sub(
        lambda link: f"{link[1]}[{link[2]}]({repository}/{'raw' if link[1] else 'blob'}/main/{link[3]})", text
    )


def check_sdist(sdist: Path, files: Iterable[str]) -> None:
    """Compares the sdist with the tree.

    Raises:
        Wrong: A file is missing, or something is a link.
    """
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    links = [member.name for member in members if member.issym() or member.islnk()]
    if links:
        raise Wrong(f"{sdist.name} holds links: {', '.join(links[:5])}")
    there = {member.name.partition("/")[2] for member in members if member.isfile()}
    missing = sorted(name for name in files if name not in there)
    missing += sorted(packaged for packaged in packaged_names(files) if packaged not in there)
    if missing:
        raise Wrong(f"{sdist.name} lacks {len(missing)} files, among them {', '.join(missing[:5])}")


def check_wheel(wheel: Path, files: Iterable[str]) -> None:
    """Compares the wheel with the tree.

    Raises:
        Wrong: A file is missing, or one is there that does not belong.
    """
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = packaged_names(files)
    if there != wanted:
        missing, foreign = sorted(wanted - there), sorted(there - wanted)
        raise Wrong(f"{wheel.name}: missing {missing[:5]}, not of the package {foreign[:5]}")


def packaged_names(files: Iterable[str]) -> set[str]:
    """Returns the names under which the wheel holds the tree's files."""
    parted = [name.partition("/") for name in files]
    return {f"{PACKAGED[top]}/{rest}" for top, slash, rest in parted if slash and top in PACKAGED}


def check_same(wheel: Path, other: Path) -> None:
    """Compares two wheels, member by member.

    Raises:
        Wrong: They differ.
    """
    digests, others = digests_of(wheel), digests_of(other)
    differing = sorted(name for name in digests.keys() | others.keys() if digests.get(name) != others.get(name))
    if differing:
        raise Wrong(f"the wheel of the sdist and that of the tree differ in {', '.join(differing[:5])}")


def digests_of(wheel: Path) -> Mapping[str, str]:
    """Returns a digest of each member, without the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith(".dist-info/RECORD")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def check_metadata(tools: Path, *packages: Path) -> None:
    """Checks the metadata as an index does."""
    run(tools, "-m", "twine", "check", "--strict", *map(str, packages))


def check_client(folder: Path, wheel: Path) -> None:
    """Installs the wheel alone, follows the hint of its command, and uses it.

    Raises:
        Wrong: The hint is missing, or what it says does not help.
    """
    python = make_environment(folder)
    run(python, "-m", "pip", "install", "--quiet", str(wheel))
    run(python, "-c", "import tilewire; tilewire.Client(); tilewire.AsyncClient()")
    command = python.parent / "tilewire"
    hint = subprocess.run([command, "--version"], capture_output=True, text=True, check=False, cwd=folder)
    advised = re.search(r"run: pip install '(.+)'", hint.stderr)
    if hint.returncode != 2 or advised is None:
        raise Wrong(f"without typer the command says {hint.stderr!r}, status {hint.returncode}")
    # By its name alone, wherever it came from: what is installed satisfies it.
    run(python, "-m", "pip", "install", "--quiet", advised[1])
    shown = subprocess.run([command, "--version"], capture_output=True, text=True, check=True, cwd=folder).stdout
    if shown.strip() not in wheel.name:
        raise Wrong(f"the command says that it is {shown!r}")


def check_neighbour(folder: Path, wheel: Path) -> None:
    """Installs another project's package before and after ours.

    Raises:
        Wrong: One of them does not work any more.
    """
    python = make_environment(folder)
    run(python, "-m", "pip", "install", "--quiet", NEIGHBOUR)
    run(python, "-m", "pip", "install", "--quiet", str(wheel))
    run(python, "-c", f"import tilewire; tilewire.Client(); {NEIGHBOUR_WORKS}")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", NEIGHBOUR)
    run(python, "-c", "import tilewire; tilewire.Client()")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", NEIGHBOUR)
    run(python, "-c", f"import tilewire; tilewire.Client(); {NEIGHBOUR_WORKS}")
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "tilewire")
    run(python, "-c", NEIGHBOUR_WORKS)


def check_server(folder: Path, wheel: Path) -> None:
    """Serves with the wheel, from a folder whose modules have the names of others, and multiplies.

    Raises:
        Wrong: It does not start, answers wrongly, or does not end in order.
    """
    python = make_environment(folder / "environment")
    borrowed = {
        str(Path(spec.origin).parents[1])
        for spec in map(importlib.util.find_spec, ("fastapi", "torch"))
        if spec and spec.origin
    }
    site_packages = next((folder / "environment" / "lib").glob("python*/site-packages"))
    (site_packages / "borrowed.pth").write_text("\n".join(sorted(borrowed)) + "\n", encoding="utf-8")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(wheel))
    misleading = folder / "misleading"
    for name, text in MISLEADING.items():
        (misleading / name).parent.mkdir(parents=True, exist_ok=True)
        (misleading / name).write_text(text, encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TILEWIRE_", "PYTHONPATH"))
    }
    limits = ("--gateways", "1", "--arena-bytes", "256MiB", "--max-body-bytes", "16MiB", "--max-result-bytes", "16MiB")
    command = [str(python.parent / "tilewire"), "serve", "--port", "0", "--device", "cpu", *limits]
    with subprocess.Popen(
        command, cwd=misleading, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None, "This is a bug."
            announced = next((found for line in server.stdout if (found := ANNOUNCED.search(line))), None)
            if announced is None:
                raise Wrong(f"the server ended with status {server.wait(STOP_TIMEOUT_S)} before it was ready")
            check_product(announced[1])
        finally:
            server.send_signal(signal.SIGTERM)
            status = server.wait(STOP_TIMEOUT_S)
    if status:
        raise Wrong(f"the server ended with status {status}")


def check_product(url: str) -> None:
    """Multiplies two matrices.

    Raises:
        Wrong: The product is another.
    """
    body = json.dumps({"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}).encode()
    request = urllib.request.Request(f"{url}/v1/matmul", body, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=REQUEST_TIMEOUT_S) as response:
        product = json.load(response)["out"]
    if product != [[19.0, 22.0], [43.0, 50.0]]:
        raise Wrong(f"the product is {product}")


def make_environment(folder: Path) -> Path:
    """Makes a fresh virtual environment; its interpreter."""
    venv.create(folder, with_pip=True, symlinks=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str) -> None:
    """Runs an interpreter elsewhere than in the checkout, whose folders it would import."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [python, *arguments], check=True, capture_output=True, text=True, cwd=python.parents[1], env=environment
    )


def one(folder: Path, pattern: str) -> Path:
    """Returns the one file that a pattern finds."""
    (path,) = folder.glob(pattern)
    return path


if __name__ == "__main__":
    sys.exit(main())

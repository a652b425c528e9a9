"""Builds the image and tries it, on a machine without Docker: `make image-test`. Needs root, buildah and debootstrap.

Owns the throw-away base (Debian by debootstrap), the build (buildah, chroot isolation) and the trial: the image's entry point
as process 1 of its own namespaces, as the image's user, without capabilities, on a read-only root; ready, a product by curl, a
scrape, SIGTERM, exit status. Where packages come from is read from this machine's pip and apt and handed on, never written
down. Knows nothing of the service but its HTTP paths.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIRROR = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates"
CA_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
IMAGE = "localhost/tilewire:try"
READY_TIMEOUT_S, STOP_TIMEOUT_S, POLL_S = 120.0, 60.0, 0.1
BODY = '{"a": [[1, 2], [3, 4]], "b": [[5, 6], [7, 8]]}'
ANSWER = [[19.0, 22.0], [43.0, 50.0]]

# Runs in namespaces of its own: a read-only root with the two folders that the image declares, then the image's user without
# any capability. `exec` all along, so that the entry point is process 1.
STAGE = """
set -eu
root=$1 user=$2; shift 2
mount --bind "$root" "$root"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=64k,mode=1777 tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
for folder in tmp var/cache/tilewire; do mount -t tmpfs -o mode=1777 tmpfs "$root/$folder"; done
mount -o remount,bind,ro "$root"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups \\
  --bounding-set=-all --inh-caps=-all --no-new-privs "$@"
"""


def main() -> None:
    """Makes the base, builds, tries, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/tilewire-image"), help="where all of it lies")
    parser.add_argument(
        "--suite", default="bookworm", help="Debian release of the base; its Python must be 3.11 or newer"
    )
    parser.add_argument(
        "--torch-in-base", action="store_true", help="a base that brings torch and Triton, as GPU bases do"
    )
    parser.add_argument(
        "--precompile", default="", help='kernels to compile into the image, such as "cuda:90 hip:gfx942"'
    )
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap") and shutil.which("curl")):
        sys.exit("this needs root, and: apt-get install buildah debootstrap curl")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    workshop = Workshop(folder)
    report(f"date        {dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M} UTC")
    base = make_base(workshop, arguments.suite, with_torch=arguments.torch_in_base)
    build(workshop, base, arguments.precompile)
    with workshop.container() as (name, rootfs):
        describe(rootfs)
        trial(workshop.config_of(name), rootfs)
    report("all is well")


class Workshop:
    """Where images are kept: a storage of its own, so that no other tool's images are touched.

    Args:
        folder: Of the storage.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._buildah = ["buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self._buildah += ["--storage-driver", "vfs"]

    def buildah(self, *arguments: str) -> str:
        """Runs buildah; what it prints on standard error goes to the log."""
        with (self.folder / "log").open("ab") as log:
            done = subprocess.run([*self._buildah, *arguments], stdout=subprocess.PIPE, stderr=log, check=False)
        if done.returncode:
            sys.exit(f"buildah {arguments[0]} failed:\n{tail(self.folder / 'log')}\n{done.stdout.decode()[-4000:]}")
        return done.stdout.decode().strip()

    def has(self, image: str) -> bool:
        """Whether there is such an image."""
        return bool(self.buildah("images", "--quiet", "--filter", f"reference={image}"))

    @contextlib.contextmanager
    def container(self) -> Iterator[tuple[str, Path]]:
        """A container of the built image, mounted: its name and its root folder."""
        name = self.buildah("from", "--pull-never", IMAGE)
        try:
            yield name, Path(self.buildah("mount", name))
        finally:
            self.buildah("umount", name)
            self.buildah("rm", name)

    def config_of(self, name: str) -> dict[str, object]:
        """What the image says about itself: user, environment, entry point."""
        docker = json.loads(self.buildah("inspect", name))["Docker"]
        config: dict[str, object] = docker["config"]
        return config


def make_base(workshop: Workshop, suite: str, *, with_torch: bool) -> str:
    """A Debian with Python, as the image's base; made once."""
    image = f"localhost/tilewire-base:{suite}{'-torch' if with_torch else ''}"
    if workshop.has(image):
        return image
    tree = workshop.folder / f"base-{suite}"
    if not (tree / "usr/bin/python3").exists():
        run("debootstrap", "--variant=minbase", f"--include={PACKAGES}", suite, str(tree), MIRROR)
    shutil.copy(CA_BUNDLE, tree / CA_BUNDLE.relative_to("/"))
    name = workshop.buildah("from", "scratch")
    workshop.buildah("add", name, str(tree), "/")
    if with_torch:
        pins = [
            line
            for line in (ROOT / "constraints/cpu.txt").read_text().splitlines()
            if line.startswith(("torch=", "triton="))
        ]
        options, secret = packages_of_this_machine(workshop.folder)
        volumes = [*options, "--volume", f"{secret}:/etc/pip.conf:ro"]
        workshop.buildah(
            "run", "--isolation", "chroot", name, "--", "sh", "-c", "apt-get update && apt-get install -y python3-pip"
        )
        install = ["python3", "-m", "pip", "install", "--break-system-packages", "--no-cache-dir", *pins]
        workshop.buildah("run", "--isolation", "chroot", *volumes, name, "--", *install)
    workshop.buildah("commit", "--rm", name, image)
    return image


def build(workshop: Workshop, base: str, precompile: str) -> None:
    """Builds the image from the Dockerfile."""
    began_s = time.monotonic()
    options, secret = packages_of_this_machine(workshop.folder)
    version = subprocess.run(
        [sys.executable, "-c", "from tilewire._version import __version__; print(__version__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    settings = {"BASE_IMAGE": base, "PRECOMPILE": precompile, "VERSION": version}
    build_arguments = [part for name, value in settings.items() for part in ("--build-arg", f"{name}={value}")]
    workshop.buildah(
        *("build", "--isolation", "chroot", "--format", "docker", "--pull-never", "--layers=false", "--tag", IMAGE),
        *("--secret", f"id=pip_conf,src={secret}"),
        *options,
        *build_arguments,
        str(ROOT),
    )
    report(f"build       {shlex.join(build_arguments)}")
    report(f"built       in {time.monotonic() - began_s:.0f} s with {run('buildah', '--version')}")


def describe(rootfs: Path) -> None:
    """Says what is in the image."""
    debian = (rootfs / "etc/debian_version").read_text().strip()
    packages = (rootfs / "opt/tilewire/packages.txt").read_text().splitlines()
    megabytes = int(run("du", "--summarize", "--block-size=1M", str(rootfs)).split()[0])
    python = run("chroot", str(rootfs), "/opt/tilewire/bin/python", "--version")
    kernels = sum(1 for path in (rootfs / "opt/tilewire/kernels").rglob("*") if path.is_file())
    report(
        f"image       Debian {debian}, {python}, {len(packages)} Python packages, {kernels} kernel files, {megabytes} MiB"
    )


def packages_of_this_machine(folder: Path) -> tuple[list[str], Path]:
    """How this machine's pip finds packages.

    Returns:
        Options that let a build see the local folders among them, and a pip.conf to hand in as a secret.
    """
    listed = run(sys.executable, "-m", "pip", "config", "list").splitlines()
    found = {key.rpartition(".")[2]: value.strip("'\"") for key, _, value in (line.partition("=") for line in listed)}
    wanted = ("index-url", "extra-index-url", "find-links", "cert", "proxy", "default-timeout", "trusted-host")
    secret = folder / "pip.conf"
    secret.write_text("[global]\n" + "".join(f"{key} = {found[key]}\n" for key in wanted if key in found))
    secret.chmod(0o600)
    words = [
        word.removeprefix("file://") for key in ("extra-index-url", "find-links") for word in found.get(key, "").split()
    ]
    folders = {Path("/", *Path(word).parts[1:3]) for word in words if word.startswith("/")}
    return [part for path in sorted(folders) for part in ("--volume", f"{path}:{path}:ro")], secret


def trial(config: dict[str, object], rootfs: Path) -> None:
    """Runs the entry point as an orchestrator would, and uses the service."""
    user, env, entry, command = (config[key] for key in ("User", "Env", "Entrypoint", "Cmd"))
    health = config["Healthcheck"]
    assert isinstance(user, str)
    assert isinstance(env, list)
    assert isinstance(entry, list)
    assert isinstance(command, list)
    assert isinstance(health, dict)
    port = free_port()
    inside = ["env", "-i", *env, f"PORT={port}", "TILEWIRE_ARENA_BYTES=64MiB", *entry, *command]
    names = ["unshare", "--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"]
    staged = [*names, "sh", "-c", STAGE, "stage", str(rootfs), user.partition(":")[0], *inside]
    began_s = time.monotonic()
    process = subprocess.Popen(staged)
    try:
        wait_ready(process, port)
        report(
            f"ready       {time.monotonic() - began_s:.1f} s after its start, as user {user}, on port {port} from PORT"
        )
        first = first_of(process.pid)
        check_confinement(first)
        check_health([*env, f"PORT={port}"], health["Test"][1:], first)
        use(port)
        os.kill(first, signal.SIGTERM)
        status = process.wait(STOP_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    assert status == 0, f"exit status {status}"
    report("stopped     by SIGTERM to process 1, exit status 0")


def check_confinement(first: int) -> None:
    """The entry point's process is confined as the image says: by what the kernel says of it."""
    status = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{first}/status").read_text().splitlines() if ":\t" in line
    )
    assert status["NSpid"].split()[-1] == "1", status["NSpid"]
    assert set(status["Uid"].split()) == {"10001"}, status["Uid"]
    assert all(int(status[name], 16) == 0 for name in ("CapEff", "CapPrm", "CapBnd", "CapInh")), "capabilities"
    assert status["NoNewPrivs"] == "1"
    root = next(line for line in Path(f"/proc/{first}/mounts").read_text().splitlines() if line.split()[1] == "/")
    assert "ro" in root.split()[3].split(","), root
    report("confined    process 1, no capabilities, no new privileges, read-only root, /dev/shm of 64 KiB")


def check_health(env: list[str], test: list[str], first: int) -> None:
    """The image's health check, run inside."""
    enter = [
        "nsenter",
        "--target",
        str(first),
        "--mount",
        "--pid",
        "--root",
        "--wd",
        "--setuid",
        "10001",
        "--setgid",
        "10001",
    ]
    run(*enter, "--", "env", "-i", *env, *test)
    report("health      the image's health check answers 0")


def use(port: int) -> None:
    """A product, and what the scrape says of it."""
    url = f"http://127.0.0.1:{port}"
    server = json.loads(curl(f"{url}/v2"))
    engine = server["engines"][0]
    report(
        f"serves      Tilewire {server['version']}, torch {engine['torch']}, Triton {engine['triton']}, {engine['backend']}"
    )
    answer = json.loads(curl(f"{url}/v1/matmul", "--header", "content-type: application/json", "--data", BODY))
    assert answer["out"] == ANSWER, answer
    report(f"multiplied  {BODY} -> {answer['out']}")
    end_s = time.monotonic() + 10
    counted: list[str] = []
    while not counted and time.monotonic() < end_s:
        lines = curl(f"{url}/metrics").splitlines()
        counted = [line for line in lines if line.startswith("tilewire_requests_total{") and 'op="matmul"' in line]
        time.sleep(POLL_S)
    assert counted, lines
    report(f"scraped     {counted[0]}")


def wait_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Returns when it is ready."""
    end_s = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < end_s:
        if process.poll() is not None:
            sys.exit(f"the entry point ended with {process.returncode}")
        asked = subprocess.run(["curl", *QUIETLY, f"http://127.0.0.1:{port}/readyz"], capture_output=True, check=False)
        if asked.returncode == 0:
            return
        time.sleep(POLL_S)
    sys.exit("it does not become ready")


def first_of(parent: int) -> int:
    """The only child of `unshare`: process 1 of its namespace."""
    (child,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return int(child)


QUIETLY = ("--silent", "--show-error", "--fail", "--noproxy", "*", "--max-time", "10")


def curl(*arguments: str) -> str:
    """What curl gets."""
    return run("curl", *QUIETLY, *arguments)


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def run(*command: str) -> str:
    """Runs a command; its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-6000:]


def report(line: str) -> None:
    """Says a line of the outcome."""
    print(line, flush=True)


if __name__ == "__main__":
    main()

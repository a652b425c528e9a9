"""The packages: `make dist` passes, and notices what would be wrong with a release."""

from __future__ import annotations

import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from deploy import make_dist
from deploy.make_dist import Wrong, absolute_links, check_same, check_sdist, check_wheel, export, point_to

FILES = ["README.md", "tilewire/__init__.py", "service/errors.py", "kernels/selection/tuned/x.json", "docs/api.md"]
IN_WHEEL = ["tilewire/__init__.py", "tilewire/service/errors.py", "tilewire/kernels/selection/tuned/x.json"]


def sdist_of(path: Path, names: list[str]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"tilewire-1/{name}"))
    return path


def wheel_of(path: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**members, "tilewire-1.dist-info/RECORD": path.name}.items():
            archive.writestr(name, text)
    return path


def test_a_file_that_the_sdist_lacks_is_named(tmp_path: Path) -> None:
    check_sdist(sdist_of(tmp_path / "whole.tar.gz", [*FILES, *IN_WHEEL]), FILES)
    with pytest.raises(Wrong, match=r"docs/api\.md"):
        check_sdist(sdist_of(tmp_path / "less.tar.gz", [*FILES[:-1], *IN_WHEEL]), FILES)
    with pytest.raises(Wrong, match=r"tilewire/service/errors\.py"):
        check_sdist(sdist_of(tmp_path / "links.tar.gz", FILES), FILES)


def test_a_link_in_the_sdist_is_wrong(tmp_path: Path) -> None:
    link = tarfile.TarInfo("tilewire-1/tilewire/service")
    link.type, link.linkname = tarfile.SYMTYPE, "../service"
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as archive:
        archive.addfile(link)
    with pytest.raises(Wrong, match="holds links: tilewire-1/tilewire/service"):
        check_sdist(tmp_path / "x.tar.gz", [])


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    members = dict.fromkeys(IN_WHEEL, "")
    check_wheel(wheel_of(tmp_path / "whole.whl", members), FILES)
    with pytest.raises(Wrong, match=r"x\.json"):
        check_wheel(wheel_of(tmp_path / "less.whl", dict.fromkeys(IN_WHEEL[:-1], "")), FILES)
    with pytest.raises(Wrong, match=r"kernels/__init__\.py"):
        check_wheel(wheel_of(tmp_path / "more.whl", {**members, "kernels/__init__.py": ""}), FILES)


def test_wheels_are_compared_member_by_member(tmp_path: Path) -> None:
    one = wheel_of(tmp_path / "one.whl", {"tilewire/__init__.py": "1"})
    check_same(one, wheel_of(tmp_path / "same.whl", {"tilewire/__init__.py": "1"}))
    with pytest.raises(Wrong, match=r"tilewire/__init__\.py"):
        check_same(one, wheel_of(tmp_path / "other.whl", {"tilewire/__init__.py": "2"}))


def test_links_become_addresses() -> None:
    text = "![p](docs/a.png) [api](docs/api.md#ops) [out](https://x.test/) [here](#there) `[i](x)`"
    assert absolute_links(text, "https://h.test/r") == (
        "![p](https://h.test/r/raw/main/docs/a.png) [api](https://h.test/r/blob/main/docs/api.md#ops) "
        "[out](https://x.test/) [here](#there) `[i](https://h.test/r/blob/main/x)`"
    )


def test_the_tree_is_exported_and_pointed_to_a_repository(tmp_path: Path) -> None:
    files = export(make_dist.ROOT, tmp_path / "tree")
    assert {"README.md", "service/errors.py", "tilewire/_clients/client.py"} <= set(files)
    assert (tmp_path / "tree/tilewire/service").is_symlink()
    point_to(tmp_path / "tree", "https://h.test/r")
    assert 'Repository = "https://h.test/r"' in (tmp_path / "tree/pyproject.toml").read_text()
    readme = (tmp_path / "tree/README.md").read_text()
    assert "](docs/" not in readme
    assert "![" not in readme or "https://h.test/r/raw/main/" in readme
    with pytest.raises(Wrong, match=r"project\.urls"):
        point_to(tmp_path / "tree", "https://h.test/r")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(os.environ.get("PIP_NO_INDEX") == "1", reason="pip has no index here")
def test_make_dist_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = make_dist.main(["--out", str(tmp_path), "--repository", "https://h.test/r"])
    said = capfd.readouterr()
    assert status == 0, said.err
    assert said.out.count("ok: ") == 7
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith("METADATA"))).decode()
    assert "Project-URL: Repository, https://h.test/r" in metadata
    assert "Provides-Extra: cli" in metadata

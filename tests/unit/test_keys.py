"""The file of API keys: what is read, what is refused, and that what `tilewire key` prints is such a file."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewire.service.keys import KeysError, digest_of, entry_for, is_readable_by_everyone, make_key, read_keys

DIGEST = "0" * 64
ENTRY = f'[[keys]]\nname = "one"\nsha256 = "{DIGEST}"\n'


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


def test_an_entry_grants_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    text = ENTRY + 'ops = ["matmul"]\nread = ["weights/*"]\nrequests_per_s = 2.5\nbytes_per_s = "64MiB"\nweight = 3\n'
    text += f'[[keys]]\nname = "two"\nsha256 = "{"1" * 64}"\n'
    one, two = read_keys(written(tmp_path, text))
    assert (one.ops, one.read, one.write, one.shared_memory) == (("matmul",), ("weights/*",), (), False)
    assert (one.requests_per_s, one.quota_bytes_per_s, one.has_quota) == (2.5, 64 * 2**20, True)
    assert (one.weight, two.weight) == (3, 1)
    assert (two.ops, two.read, two.write, two.has_quota) == ((), (), (), False)


def test_no_keys_must_be_said(tmp_path: Path) -> None:
    assert read_keys(written(tmp_path, "keys = []")) == ()
    with pytest.raises(KeysError, match="keys"):
        read_keys(written(tmp_path, ""))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("keys = [", "keys.toml"),
        (ENTRY + "colour = 1\n", "colour"),
        (ENTRY.replace('"one"', '"a b"'), "name"),
        (ENTRY.replace('"one"', '""'), "name"),
        (ENTRY.replace(DIGEST, "0" * 63), "sha256"),
        (ENTRY.replace(DIGEST, "A" * 64), "sha256"),
        (ENTRY + 'ops = ["matmull"]\n', "matmull"),
        (ENTRY + 'read = ["a*b"]\n', "a[*]b"),
        (ENTRY + 'write = [""]\n', "tensor"),
        (ENTRY + "weight = 0\n", "weight: expected 1 to 100; got 0"),
        (ENTRY + "weight = 101\n", "weight: expected 1 to 100"),
        (ENTRY + "weight = 1.5\n", "weight"),
        (ENTRY + "requests_per_s = 0\n", "requests_per_s"),
        (ENTRY + "requests_per_s = nan\n", "requests_per_s"),
        (ENTRY + 'bytes_per_s = "lots"\n', "bytes_per_s"),
        (ENTRY + "bytes_per_s = 0\n", "bytes_per_s"),
        (ENTRY + f"bytes_per_s = {'9' * 400}\n", "one: bytes_per_s"),
        (ENTRY + f'bytes_per_s = "{"9" * 400}"\n', "one: bytes_per_s"),
        (ENTRY + f"weight = {'1' * 5000}\n", "keys.toml: .*5000 digits"),
        (ENTRY + f"weight = 0x{'f' * 5000}\n", "keys.toml: .*digits"),
        (ENTRY + f"read = {'[' * 3000}\n", "keys.toml: "),
        (ENTRY + ENTRY.replace(DIGEST, "1" * 64), "name: given twice"),
        (ENTRY + ENTRY.replace("one", "two"), "sha256: given twice"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(KeysError, match=named):
        read_keys(written(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        read_keys(tmp_path / "none.toml")


@pytest.mark.timeout(20)
def test_what_has_no_end_or_no_beginning_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(KeysError, match=f"{path}: not a regular file"):
            read_keys(path)


def test_a_file_that_everyone_may_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="write"):
        read_keys(written(tmp_path, ENTRY, 0o606))


def test_a_file_that_everyone_may_read_is_told(tmp_path: Path) -> None:
    assert is_readable_by_everyone(written(tmp_path, ENTRY, 0o644))
    assert not is_readable_by_everyone(written(tmp_path, ENTRY, 0o640))


def test_keys_are_long_and_differ() -> None:
    one, other = make_key(), make_key()
    assert one != other
    assert one.startswith("tw_")
    assert len(one) >= 3 + 256 // 6
    assert digest_of(one) == hashlib.sha256(one.encode()).hexdigest()


def test_a_made_entry_is_a_file(tmp_path: Path) -> None:
    key = make_key()
    text = entry_for("search-team", key)
    assert key not in text
    (entry,) = read_keys(written(tmp_path, text))
    assert (entry.name, entry.sha256, entry.write) == ("search-team", digest_of(key), ())


def test_the_command_prints_the_key_apart_from_its_entry(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tilewire", "key", "search"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (entry,) = read_keys(written(tmp_path, done.stdout))
    key = done.stderr.split()[-1]
    assert (entry.name, entry.sha256) == ("search", digest_of(key))
    assert key not in done.stdout


def test_the_command_refuses_a_name(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "tilewire", "key", "a b"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "name" in done.stderr
    assert "tw_" not in done.stderr

"""API keys: what a key looks like, the file that lists who may do what, and how a new entry is made.

Owns the format of `--api-keys-file` and the hash; `gateway.auth.authenticator` checks requests against it. Read by the
supervisor before it starts anything, and by each gateway.

    [[keys]]
    name = "search"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    ops = ["matmul", "softmax"]
    read = ["weights/*"]
    write = ["scratch/search/*"]
    requests_per_s = 200
    bytes_per_s = "64MiB"
    weight = 2

The hash is one SHA-256, not a slow one: slow hashes protect secrets that people choose and that can be guessed. A key
of ours is 256 random bits, which no dictionary holds and nobody counts through, so slowness would only cost each
request its latency.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import stat
from collections import Counter
from pathlib import Path

import msgspec
from pydantic import ByteSize, TypeAdapter, ValidationError

from tilewire.service.ops.program.op import PROGRAM
from tilewire.service.ops.registry import OPS
from tilewire.service.watched_files import UnusableFile, check_regular

PREFIX = "tw_"
SECRET_BYTES = 32

# Each gateway keeps one small record for each key that has a quota.
MAX_KEYS = 1024

# With larger ones, the shares of others would be too small to compute anything in time.
MAX_WEIGHT = 100

EVERYTHING = "*"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9._/-]{0,255}\*?", re.ASCII)


class KeysError(UnusableFile):
    """The file cannot be used; the message says why, and names no secret."""


# Raised by decoding and checks. Beside the format's own errors:
# - ValueError: bytes that are no text, or numbers of more digits than Python reads or prints.
# - OverflowError: an integer that no float can be.
# - RecursionError: lists in lists.
UNUSABLE = (KeysError, msgspec.DecodeError, ValueError, OverflowError, RecursionError)


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the file; what is not granted is not allowed.

    Attributes:
        name: For logs and metrics; the key itself is in neither.
        sha256: SHA-256 of the key, in hexadecimal.
        ops: Ops that it may run; `*` for all.
        read: Resident tensors that it may use and fetch: names, or prefixes that end with `*`.
        write: Those that it may store, replace and delete, likewise.
        shared_memory: It may register shared memory, name it in requests and list regions.
        requests_per_s: Most requests in a second, over all gateways; none for no quota.
        bytes_per_s: Most bytes of bodies and answers in a second, likewise; plain or with a unit.
        weight: Its share of a busy server beside those of other keys, 1 to 100.
    """

    name: str
    sha256: str
    ops: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    shared_memory: bool = False
    requests_per_s: float | None = None
    bytes_per_s: int | str | None = None
    weight: int = 1

    @property
    def quota_bytes_per_s(self) -> float | None:
        """`bytes_per_s` in bytes."""
        return None if self.bytes_per_s is None else float(_SIZE.validate_python(self.bytes_per_s))

    @property
    def has_quota(self) -> bool:
        """Whether what it uses has to be counted."""
        return self.requests_per_s is not None or self.bytes_per_s is not None


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. `keys` must be there: an empty file is a mistake, `keys = []` locks everyone out."""

    keys: tuple[Key, ...]


_SIZE = TypeAdapter(ByteSize)


def digest_of(key: str) -> str:
    """Returns the digest that the file holds instead of the key."""
    return hashlib.sha256(key.encode()).hexdigest()


def make_key() -> str:
    """A new key: 256 random bits, with a prefix by which scanners of leaked secrets recognise it."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def entry_for(name: str, key: str) -> str:
    """The lines for the file: every op, every tensor to read, none to write."""
    ops = ", ".join(f'"{op}"' for op in (*OPS, PROGRAM))
    return (
        f'[[keys]]\nname = "{check_name(name)}"\nsha256 = "{digest_of(key)}"\n'
        f'ops = [{ops}]\nread = ["{EVERYTHING}"]\nwrite = []\n'
    )


def check_name(name: str) -> str:
    """Checks the name of a key.

    Raises:
        KeysError: It has other characters, or too many.
    """
    if _NAME.fullmatch(name) is None:
        raise KeysError(f"name: 1 to 64 of A-Z a-z 0-9 . _ -; got {name[:64]!r}")
    return name


def read_keys(path: Path) -> tuple[Key, ...]:
    """Reads the file.

    Raises:
        KeysError: It cannot be read, others may write it, or it is not what the format says; the message names the entry.
    """
    try:
        check_regular(path)
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror or error}") from error
    if mode & stat.S_IWOTH:
        raise KeysError(f"{path}: everyone may write it, so everyone may let himself in; take that right away")
    try:
        keys = msgspec.toml.decode(data, type=KeysFile).keys
        _check(keys)
    except UNUSABLE as error:
        raise KeysError(f"{path}: {error}") from None
    return keys


def is_readable_by_everyone(path: Path) -> bool:
    """Whether the file deserves a warning: its hashes give no key away, but its names and rights are nobody's business."""
    return bool(path.stat().st_mode & stat.S_IROTH)


def _check(keys: tuple[Key, ...]) -> None:
    if len(keys) > MAX_KEYS:
        raise KeysError(f"{len(keys)} keys; at most {MAX_KEYS}")
    for seen, what in ((([key.name for key in keys]), "name"), ([key.sha256 for key in keys], "sha256")):
        twice = [value for value, count in Counter(seen).items() if count > 1]
        if twice:
            raise KeysError(f"{what}: given twice: {', '.join(sorted(twice))}")
    for key in keys:
        check_name(key.name)
        _check_key(key)


def _check_key(key: Key) -> None:
    if _DIGEST.fullmatch(key.sha256) is None:
        raise KeysError(f"{key.name}: sha256: expected 64 hexadecimal digits in lower case")
    for op in key.ops:
        if op not in OPS and op not in (PROGRAM, EVERYTHING):
            raise KeysError(
                f"{key.name}: ops: no op {op[:64]!r}; there are {', '.join(OPS)}, {PROGRAM} and {EVERYTHING}"
            )
    for pattern in (*key.read, *key.write):
        if not pattern or _PATTERN.fullmatch(pattern) is None:
            raise KeysError(f"{key.name}: {pattern[:64]!r} is neither a tensor's name nor a prefix that ends with *")
    if not 1 <= key.weight <= MAX_WEIGHT:
        raise KeysError(f"{key.name}: weight: expected 1 to {MAX_WEIGHT}; got {key.weight}")
    if key.requests_per_s is not None and not key.requests_per_s > 0:
        raise KeysError(f"{key.name}: requests_per_s: expected more than 0")
    try:
        nbytes = key.quota_bytes_per_s
    except (ValidationError, OverflowError):
        raise KeysError(f"{key.name}: bytes_per_s: expected bytes, such as 1000000 or 64MiB") from None
    if nbytes is not None and not nbytes > 0:
        raise KeysError(f"{key.name}: bytes_per_s: expected more than 0")

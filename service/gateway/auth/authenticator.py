"""Authenticates and authorises requests: API keys, what is open without one, and rights over ops and resident tensors.

Owns the check of keys, the reload of their file and `authorise`, which every route calls. Runs in the gateway's event loop.

Only SHA-256 digests are kept. A key is looked up by its digest, and the digest is then compared in constant time. The
time of the look-up can reveal something about the digest of a sent key. From a digest nobody comes back to a key.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tilewire.service.errors import Forbidden, Unauthorized
from tilewire.service.gateway.api.pages import CONSOLE_PATHS, DOCS_PATHS
from tilewire.service.gateway.auth.flows import Flow, flow_of_key
from tilewire.service.gateway.auth.quotas import Quotas
from tilewire.service.gateway.grpc import paths
from tilewire.service.keys import EVERYTHING, Key, digest_of, read_keys
from tilewire.service.watched_files import FileWatch

logger = logging.getLogger(__name__)

# Probes carry no keys.
HEALTH_PATHS = frozenset({"/healthz", "/readyz", "/v2/health/live", "/v2/health/ready"}) | paths.HEALTH_PATHS

# Paths that each word of `--keyless` opens. Exact paths, as the router will see them: another spelling needs a key.
KEYLESS_PATHS: Mapping[str, frozenset[str]] = {
    "docs": frozenset({*DOCS_PATHS, "/openapi.json"}) | paths.REFLECTION_PATHS,
    "console": frozenset(CONSOLE_PATHS),
    "metrics": frozenset({"/metrics"}),
}

LOOK_S = 0.25
RELOAD_S = 2.0


class Access(msgspec.Struct, frozen=True):
    """Identity and rights of a client; the rights are as in `Key`.

    Attributes:
        key: The entry of the key; None when none was needed.
        flow: Flow of the key; None when none was needed.
        quotas: Counts what the key uses; None for one without a quota.
    """

    key: Key | None = None
    ops: tuple[str, ...] = (EVERYTHING,)
    read: tuple[str, ...] = (EVERYTHING,)
    write: tuple[str, ...] = (EVERYTHING,)
    shared_memory: bool = True
    flow: Flow | None = None
    quotas: Quotas | None = None

    @property
    def name(self) -> str | None:
        """The key's name, for logs and metrics."""
        return None if self.key is None else self.key.name

    @property
    def holder(self) -> Key:
        """The key of one that has a quota."""
        assert self.key is not None, "This is a bug."
        return self.key

    @property
    def is_unlimited(self) -> bool:
        """Whether every op, and reading and writing of every tensor, is allowed."""
        return all(EVERYTHING in granted for granted in (self.ops, self.read, self.write))

    def may_run(self, op: str) -> bool:
        """Whether an op may be run."""
        return op in self.ops or EVERYTHING in self.ops

    def may_read(self, tensor: str) -> bool:
        """Whether a resident tensor may be used and fetched."""
        return EVERYTHING in self.read or any(_matches(pattern, tensor) for pattern in self.read)


# Of nobody: what a path that is open to all gives to requests without a key.
NO_ACCESS = Access(ops=(), read=(), write=(), shared_memory=False)


def authorise(
    access: Access,
    *,
    op: str | None = None,
    read: Iterable[str] = (),
    write: Iterable[str] = (),
    shared_memory: bool = False,
) -> None:
    """Checks the rights of a request; called before its body is read, or as soon as its names are known.

    Args:
        access: Rights and usage of the exchange.
        op: Op of the request, if any.
        read: Names of resident tensors that it uses or fetches. Existing or not: the answer is the same.
        write: Names that it stores, replaces or deletes.
        shared_memory: It registers, names or lists shared memory. Regions are nobody's own: whoever may name one reads
            and writes them all.

    Raises:
        Forbidden: Not all of that is allowed.
    """
    if op is not None and not access.may_run(op):
        raise Forbidden(f"op: this key may not run {op}")
    for name in read:
        if not access.may_read(name):
            raise Forbidden(f"tensor: this key may not read {name[:255]!r}")
    for name in write:
        if not any(_matches(pattern, name) for pattern in access.write):
            whose = (
                "this server's resident tensors are read-only" if access.key is None else "this key may not write it"
            )
            raise Forbidden(f"tensor: {name[:255]!r}: {whose}")
    if shared_memory and not access.shared_memory:
        whose = "this server is read-only" if access.key is None else "this key may not use it"
        raise Forbidden(f"shared memory: {whose}")


def _matches(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith(EVERYTHING) else name == pattern


class Authenticator:
    """Authenticates requests by their API keys.

    Args:
        path: The file of keys; None when no key is needed.
        keyless: Words of `KEYLESS_PATHS` that need no key.
        is_read_only: Nobody may write residents or use shared memory.
        quotas: Counts what keys use.
        report: As of `FileWatch`; a thread calls it, too.

    Attributes:
        keys_version: Number of times that keys were taken over; from 1.

    Raises:
        KeysError: The file cannot be used.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        keyless: Iterable[str] = (),
        is_read_only: bool = False,
        quotas: Quotas | None = None,
        report: Callable[[bool], object] = lambda _is_current: None,
    ) -> None:
        self._path = path
        self._quotas = quotas
        self._is_read_only = is_read_only
        self._open_paths = HEALTH_PATHS.union(*(KEYLESS_PATHS[word] for word in keyless))
        self._anyone = Access(write=(), shared_memory=False) if is_read_only else Access()
        self.keys_version = 1
        self._by_digest: dict[str, Access] = {}
        if path is not None:
            self._watch = FileWatch("the API keys stay as they were", [path], report)
            self._take_over(read_keys(path))

    @property
    def needs_keys(self) -> bool:
        """Whether keys are configured."""
        return self._path is not None

    def identify(self, path: str, headers: Mapping[str, str]) -> Access:
        """Authenticates a request before its body is read, by its path as the router will see it.

        Raises:
            Unauthorized: It needs a key and has none that is known.
        """
        if self._path is None:
            return self._anyone
        return NO_ACCESS if path in self._open_paths else self._holder(headers)

    def _holder(self, headers: Mapping[str, str]) -> Access:
        given = _key_of(headers)
        if given is None:
            raise Unauthorized("key: send one, as `Authorization: Bearer …` or `X-API-Key: …`")
        digest = digest_of(given)
        access = self._by_digest.get(digest)
        if access is None or access.key is None or not hmac.compare_digest(access.key.sha256, digest):
            raise Unauthorized("key: it is not known here")
        return access

    async def keep_current(self, *, reload_s: float = RELOAD_S) -> None:
        """Reloads the file when it changes and keeps the quotas' view fresh; until cancelled.

        Args:
            reload_s: Seconds between two looks at the file; a multiple of `LOOK_S`.
        """
        looks = 0
        while self._path is not None:
            await asyncio.sleep(LOOK_S)
            looks += 1
            if self._quotas is not None:
                self._quotas.refresh()
            if looks % round(reload_s / LOOK_S) == 0:
                await self._reload(self._path)

    async def _reload(self, path: Path) -> None:
        """Takes a changed file over. A thread reads it: that takes 0.1 s for a thousand keys."""
        if (keys := await asyncio.to_thread(self._watch.take, lambda: read_keys(path))) is not None:
            self._take_over(keys)
            logger.info("API keys were read again: %d", len(keys))

    def _take_over(self, keys: Sequence[Key]) -> None:
        self._by_digest = {key.sha256: self._access_of(key) for key in keys}
        self.keys_version += 1
        if self._quotas is not None:
            self._quotas.follow(keys)

    def _access_of(self, key: Key) -> Access:
        flow, quotas = flow_of_key(key.name, key.weight), self._quotas if key.has_quota else None
        if self._is_read_only:
            return Access(key, key.ops, key.read, write=(), shared_memory=False, flow=flow, quotas=quotas)
        return Access(key, key.ops, key.read, key.write, key.shared_memory, flow, quotas)


def _key_of(headers: Mapping[str, str]) -> str | None:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and bearer.strip():
        return bearer.strip()
    return headers.get("x-api-key") or None

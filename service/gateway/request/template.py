"""Caches planned requests: one whose head and tensor header came before is neither parsed nor planned again.

One cache serves all connections of a gateway. An entry is found by the bytes of a head, without the values that are
each request's own. Below it stand templates, found by the bytes in front of the tensors. Whatever may change between two
requests is checked each time: quotas, the drain, the types of residents, and whether the API keys were read again since.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from tilewire.service.gateway.auth.authenticator import NO_ACCESS, Access
from tilewire.service.gateway.request.adapter import Api, Call, Encoder
from tilewire.service.gateway.request.head import Head, HeadKey, has_plain_lines
from tilewire.service.ipc.messages import Template
from tilewire.service.ops.op import AnyOp, TensorType

# Bounds of the cache. Entries: more than a busy gateway's connections have layers. Bytes: of heads and tensor headers.
MAX_HEADS, MAX_BYTES = 4096, 2**24
# Shapes that share one head, such as those of one body length.
MAX_TEMPLATES = 8
# Longest tensor header that is compared.
MAX_LEAD_BYTES = 2**13
# Larger results get slots of their own when they are due: that costs little beside their bytes.
MAX_SPARE_BYTES = 2**20
# Memory of a head and its first template beside their bytes, which are kept as they came and parsed. It is 2.5 KiB with
# short values, 6.7 with 2,000 bytes of them (resident memory of a gateway over 4,096 heads).
ENTRY_BYTES = 2560


class RequestTemplate(msgspec.Struct, eq=False):
    """A planned request, without its payload.

    Attributes:
        lead: Bytes in front of the tensors that determine it; None when it cannot serve another request.
        job: Message that the engine gets once.
        reads: Names of the resident tensors that it reads.
        resident_types: Types that those had when it was planned, by name.
        uses_regions: It reads or writes clients' shared memory.
        is_pinned: It needs residents in the version that it was planned with.
        inputs: First byte of each input that is no resident, in order, and whether it counts from the body's begin.
        outputs: First byte of each output, in order, and whether it counts from the begin of the results' slot.
        timeout_ns: Longest time from the request's begin until it starts; 0 for none.
        priority: 0 for the default, 1 for the most urgent.
        payload_bytes: Bytes of each output that are sent; 0 for one in a region.
        result_bytes: Bytes of the results' slot.
        encoder: Writer of the answer; None when the description of the stored result is the answer.
        store: Name under which the result becomes resident; None to answer it.
        allowed: Rights that were found to allow it; None before.
    """

    lead: bytes | None
    job: Template
    reads: tuple[str, ...]
    resident_types: tuple[tuple[str, TensorType], ...]
    uses_regions: bool
    is_pinned: bool
    inputs: tuple[tuple[int, bool], ...]
    outputs: tuple[tuple[int, bool], ...]
    timeout_ns: int
    priority: int
    payload_bytes: tuple[int, ...]
    result_bytes: int
    encoder: Encoder | None
    store: str | None = None
    allowed: Access | None = None

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the resident tensors that it stores."""
        return () if self.store is None else (self.store,)


class CachedHead(msgspec.Struct, eq=False):
    """A head that was read.

    Attributes:
        key: Bytes that identify it.
        head: As parsed.
        api: Reader of its head and body.
        op: Op that its path names.
        call: Parsed head.
        nbytes: Bytes that the entry takes.
        spare_bytes: Room that results need behind the body.
        access: Holder of the key that the head names and its rights, as of `keys_version`.
        keys_version: Version of the API keys that `access` is from; 0 before.
        allowed: Rights that were found to allow what the head says; None before.
        templates: Planned requests with this head, the newest first.
    """

    key: bytes
    head: Head
    api: Api
    op: AnyOp
    call: Call
    nbytes: int
    spare_bytes: int = 0
    access: Access = NO_ACCESS
    keys_version: int = 0
    allowed: Access | None = None
    templates: list[RequestTemplate] = []

    def find(self, memory: memoryview, begin: int, end: int) -> RequestTemplate | None:
        """The template whose lead stands at the begin of a body.

        Args:
            memory: Memory with the body.
            begin: Offset of its first byte.
            end: Offset behind its last byte: there may be bytes of other requests.
        """
        for template in self.templates:
            lead = template.lead
            if lead is not None and begin + len(lead) <= end and bytes(memory[begin : begin + len(lead)]) == lead:
                return template
        return None

    def keep(self, template: RequestTemplate) -> int:
        """Keeps a template instead of the one with the same lead, or of the oldest.

        Returns:
            Bytes by which the entry has grown.
        """
        before = self.nbytes
        others = [one for one in self.templates if one.lead != template.lead]
        self.templates = [template, *others][:MAX_TEMPLATES]
        small = [one.result_bytes for one in self.templates if one.result_bytes <= MAX_SPARE_BYTES]
        self.spare_bytes = max(small, default=0)
        self.nbytes = ENTRY_BYTES + 2 * len(self.key) + sum(len(one.lead or b"") + 256 for one in self.templates)
        return self.nbytes - before


class TemplateCache:
    """Heads and templates of one gateway, the least recently used ones dropped first."""

    def __init__(self, max_heads: int = MAX_HEADS, max_bytes: int = MAX_BYTES) -> None:
        self._max_heads = max_heads
        self._max_bytes = max_bytes
        self._heads: OrderedDict[bytes, CachedHead] = OrderedDict()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._heads)

    def find(self, key: bytes) -> CachedHead | None:
        """Looks up a head by its key."""
        cached = self._heads.get(key)
        if cached is not None:
            self._heads.move_to_end(key)
        return cached

    def add(self, key: HeadKey, head: Head, target: tuple[Api, AnyOp], call: Call) -> CachedHead | None:
        """Caches a head, unless equal bytes could mean another request."""
        if not head.is_repeatable or not has_plain_lines(key.text):
            return None
        cached = CachedHead(key.text, head, *target, call, ENTRY_BYTES + 2 * len(key.text))
        old = self._heads.pop(key.text, None)
        if old is not None:
            self._nbytes -= old.nbytes
        self._heads[key.text] = cached
        self._nbytes += cached.nbytes
        self._shrink()
        return cached

    def keep(self, cached: CachedHead, template: RequestTemplate) -> None:
        """Caches a template under its head."""
        if template.lead is not None and self._heads.get(cached.key) is cached:
            self._nbytes += cached.keep(template)
            self._shrink()

    def _shrink(self) -> None:
        while len(self._heads) > self._max_heads or self._nbytes > self._max_bytes:
            _, oldest = self._heads.popitem(last=False)
            self._nbytes -= oldest.nbytes

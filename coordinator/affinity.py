"""Which worker has a prompt's beginning in its cache: block hashes, bounded memory.

A hash chains over the blocks before it, so equal hashes mean equal beginnings. Owners are worker
incarnations: what a process had cached is forgotten with it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from specwire.rpc import encode_ids

BLOCK_TOKENS = 32
# Blocks remembered, about 200 bytes each.
_BLOCKS = 65_536
# Owners remembered of one block, the latest first.
_OWNERS = 4


class PrefixIndex:
    """Blocks of ids and the workers that ran them; the longest unused are forgotten first."""

    def __init__(self, blocks: int = _BLOCKS) -> None:
        self._blocks = blocks
        self._owners: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def note(self, ids: Sequence[int], owner: int) -> None:
        """The worker has these ids now."""
        for digest in _digests(ids):
            others = (o for o in self._owners.get(digest, ()) if o != owner)
            self._owners[digest] = (owner, *others)[:_OWNERS]
            self._owners.move_to_end(digest)
        while len(self._owners) > self._blocks:
            self._owners.popitem(last=False)

    def matches(self, ids: Sequence[int]) -> dict[int, int]:
        """Tokens at the beginning of `ids` that each worker has, where there are any."""
        found: dict[int, int] = {}
        tokens = 0
        for digest in _digests(ids):
            owners = self._owners.get(digest)
            if owners is None:
                break
            for owner in owners:
                if found.get(owner, 0) == tokens:
                    found[owner] = tokens + BLOCK_TOKENS
            tokens += BLOCK_TOKENS
        return found


def _digests(ids: Sequence[int]) -> Iterator[bytes]:
    data, size = encode_ids(ids), 4 * BLOCK_TOKENS
    chain = b""
    for start in range(0, len(data) - size + 1, size):
        chain = hashlib.blake2b(chain + data[start : start + size], digest_size=12).digest()
        yield chain

"""Which page holds which block of tokens, so that sessions with a common beginning share it.

A block is the ids of one full page. Its name is a hash of its parent's name and its ids (the chain
of vLLM's automatic prefix caching), so a name stands for everything from position 0 on. The hash is
collision-safe: a wrong hit would show one user another's tokens.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

_HASH_BYTES = 32


def chain_root(*parts: str) -> bytes:
    """The name of the empty prefix. `parts` are whatever the cached values depend on besides the
    ids: the model, the numerics, the mode they are computed in."""
    digest = blake2b(digest_size=_HASH_BYTES)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_name(parent: bytes, ids: Sequence[int]) -> bytes:
    """The name of the block `ids` behind the block named `parent`."""
    return blake2b(parent + array("I", ids).tobytes(), digest_size=_HASH_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Prefix:
    """Pages that hold the beginning of a sequence, in order, and the names of the leading ones.

    The last page may be full in part only, and pages of a fork may have no name. `groups` says of
    each page which KV groups beside the target's are written in it, wherever the page is.
    """

    pages: tuple[int, ...] = ()
    names: tuple[bytes, ...] = ()
    groups: tuple[frozenset[str], ...] = ()


class PrefixIndex:
    """Names of published pages. `idle` are those that no table holds, the least recently used
    first; they may be taken away at any time."""

    def __init__(self) -> None:
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._groups: dict[int, frozenset[str]] = {}
        self.idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, page: int) -> bool:
        return page in self._name_of

    def __len__(self) -> int:
        return len(self._name_of)

    def add(self, name: bytes, page: int, groups: frozenset[str] = frozenset()) -> None:
        """Publishes a page, unless its content is published already. `groups` are those written in
        it beside the target's."""
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name], self._name_of[page] = page, name
            self._groups[page] = groups

    def remove(self, page: int) -> None:
        del self._page_of[self._name_of.pop(page)]
        del self._groups[page]
        self.idle.pop(page, None)

    def evict(self) -> int:
        """Takes the idle page that was used least recently out of the index."""
        page = next(iter(self.idle))
        self.remove(page)
        return page

    def find(self, root: bytes, ids: Sequence[int], limit: int, page_tokens: int) -> Prefix:
        """The longest published beginning of `ids`, in whole pages, of at most `limit` tokens."""
        pages: list[int] = []
        names: list[bytes] = []
        name = root
        for start in range(0, limit - page_tokens + 1, page_tokens):
            name = block_name(name, ids[start : start + page_tokens])
            page = self._page_of.get(name)
            if page is None:
                break
            pages.append(page)
            names.append(name)
        return Prefix(tuple(pages), tuple(names), tuple(self._groups[page] for page in pages))

    def name_of(self, page: int) -> bytes | None:
        return self._name_of.get(page)

    def check_integrity(self) -> None:
        assert {n: p for p, n in self._name_of.items()} == self._page_of, "the cache maps disagree"
        assert self._groups.keys() == self._name_of.keys(), "a page's groups are lost"
        assert all(page in self._name_of for page in self.idle), "an idle page has no name"

"""One page pool and the tensors of every KV group under its tables.

A page id names a page of each group: what happens to a table (truncation, a prefix hit, a copy on
write, preemption) happens to all of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from engine.kv.cache import PagedCache
from engine.kv.pool import PagePool


class PagedGroups:
    """`caches` by group name. All have the same number of pages of the same size; pages of the
    caches behind those of the pool belong to no table."""

    def __init__(self, pool: PagePool, caches: Mapping[str, PagedCache]) -> None:
        for cache in caches.values():
            assert cache.page_count >= pool.page_count
            assert cache.geometry.page_tokens == pool.page_tokens
        self.pool, self.caches = pool, MappingProxyType(dict(caches))

    def copy_pages(self) -> None:
        """Makes shared pages writable where a table is about to write; before every write."""
        copies = self.pool.take_copies()
        if not copies:  # as nearly always, and to enter a mode takes its time
            return
        with torch.inference_mode():
            for source, to in copies:
                for cache in self.caches.values():
                    cache.copy_page(source, to)

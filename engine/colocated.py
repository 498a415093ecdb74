"""What a target and a drafter in its process tell each other: values, frozen, each role's own.

The drafter says which KV groups it needs before any page exists (`Target` -> `Group`), then gets
the target's own tables and the memory of its groups (`Handles`), and in every step the rows of its
tap layers (`TapRows`). Nothing is copied: these are the tensors that the target works on.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.api import Drafter
from engine.attention.request import KVGroup
from engine.attention.resolution import Resolution
from engine.batch import Placed
from engine.errors import SettingRefused
from engine.kv.cache import CacheGeometry, PagedCache
from engine.kv.groups import PagedGroups
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.tap_export import columns_of

log = logging.getLogger(__name__)

TARGET_GROUP = "target"


@dataclass(frozen=True, slots=True)
class DrafterSettings:
    """What an operator says about a co-located draft; "" and None: not said.

    checkpoint  a directory, or `default`: the one that ships
    model       the target's, by reference as its own setting has it
    kv_group    auto, same_cache or pooled
    The rest reads as in the settings of a draft service.
    """

    checkpoint: str = "default"
    model: str = "default"
    attention_backend: str | None = None
    kv_group: str = "auto"
    kv_dtype: str = "auto"
    dtype: str = "auto"
    head_dtype: str = "auto"
    kernels: str = "auto"
    cuda_graph_mode: str = "auto"
    max_draft_tokens: int = 7
    max_length: int | None = None
    confidences: bool = False
    warm_sessions: int = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The target as far as it is decided before its pages are allocated. Its drafter runs on its
    `device`, and its pages lie there."""

    directory: Path
    fingerprint: str
    config: ModelConfig
    attention: Resolution
    device: torch.device


@dataclass(frozen=True, slots=True)
class Group:
    """A KV group under the target's page tables. `geometry` is the layout of its tensors,
    `attention` the backend that reads them and the layout that it expects."""

    name: str
    kind: KVGroup
    geometry: CacheGeometry
    attention: Resolution


@dataclass(frozen=True, slots=True)
class Handles:
    """The target's own, by reference. `caches` are those of the drafter's groups; `memory` has the
    page pool and copies pages that are shared.

    embedding   [vocabulary, hidden]
    max_length  of a session, in tokens
    scratch_slot  first slot of a page that belongs to no session: what is written there is lost
    """

    embedding: Tensor
    head: Linear
    caches: Mapping[str, PagedCache]
    memory: PagedGroups
    max_length: int
    scratch_slot: int


@dataclass(frozen=True, slots=True)
class TapRows:
    """Rows of a step, on the model's device: bf16 [n, taps * hidden] in the order of the drafter's
    taps, positions and flat slots int64 [n], on a GPU int32. Padding has slots in the scratch page.
    No position is above `highest`, which is known on the host. The next step overwrites them."""

    rows: Tensor
    positions: Tensor
    slots: Tensor
    highest: int


def describe(drafter: Drafter | None, target: Target) -> tuple[Group, ...]:
    """The groups of the drafter, checked. Nothing is allocated yet."""
    groups = drafter.describe(target) if drafter is not None else ()
    for group in groups:
        if group.kind is KVGroup.PRIVATE:
            accepted = "same_cache, pooled: private pages are those of a draft service of its own"
            raise SettingRefused("kv_group", group.kind.value, accepted)
        own, page = group.attention.geometry, group.geometry.page_tokens
        assert own.page_tokens == page == target.attention.geometry.page_tokens
        # Both sides computed the layout; one that differs would be read as something else.
        own.check_allocated(1, group.geometry.bytes_per_token * page)
    return groups


class Beside:
    """A drafter that is attached to an engine: takes rows out of the engine's forwards."""

    def __init__(self, drafter: Drafter, groups: Sequence[Group], handles: Handles) -> None:
        self.taps = drafter.attach(handles)
        self._drafter = drafter
        self._names = tuple(group.name for group in groups)
        self._hidden = handles.embedding.shape[1]

    def write(
        self,
        placed: Sequence[Placed],
        taps: tuple[int, ...],
        tap_rows: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> tuple[str, ...]:
        """Lets the drafter write context of the items that it drafts for, in the stream of the
        step. Returns the groups that are written: none after a failure, which costs the draft its
        context and nobody else."""
        try:  # the copies too: there may be no memory for them
            self._drafter.write(self._rows(placed, taps, tap_rows, positions, slots))
        except Exception:
            log.exception("the %s drafter failed to write its context", self._drafter.method)
            return ()
        return self._names

    def _rows(
        self,
        placed: Sequence[Placed],
        taps: tuple[int, ...],
        rows: Tensor,
        positions: Tensor,
        slots: Tensor,
    ) -> TapRows:
        """Those of the items that are drafted for, with the columns of the drafter's taps."""
        chosen = _rows_of(placed)
        if chosen is not None:
            on_gpu = rows.device.type == "cuda"
            picked = torch.tensor(chosen, dtype=torch.int64, pin_memory=on_gpu)
            at = picked.to(rows.device, non_blocking=True)
            rows, positions, slots = rows[at], positions[at], slots[at]
        rows = columns_of(rows, taps, self.taps, self._hidden)
        # Padding may stand behind an item.
        highest = max(own.item.start + max(own.width, len(own.item.ids)) for own in placed) - 1
        return TapRows(rows.bfloat16(), positions, slots, highest)


def _rows_of(placed: Sequence[Placed]) -> list[int] | None:
    """Rows of the items that are drafted for; None: all, padding included."""
    if all(own.item.drafted for own in placed):
        return None
    return [
        row
        for own in placed
        if own.item.drafted
        for row in range(own.first_row, own.first_row + len(own.item.ids))
    ]

"""A start-up check: is a row's result the same bits whatever rows are beside it?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.api import Item
from engine.batch import pack

if TYPE_CHECKING:
    from engine.runner import NativeEngine

_ROWS = 9  # odd, and more than one tile of the matrix kernel
_MATES = (3, 5)
# Sessions, and rows of each, beside the row's own: a GPU has tiles of up to 32, 64 and 128 rows.
_CROWDS = (1, 20), (1, 50), (2, 50), (9, 64)


def rows_independent(engine: NativeEngine) -> bool:
    """Runs random ids together, in two parts, and one by one; compares logits and last-layer
    outputs bit by bit.
    """
    last = engine.info.layer_count - 1
    page_tokens = engine._config.page_tokens
    generator = torch.Generator().manual_seed(1)
    needed = -(-_ROWS // page_tokens) + sum(-(-n // page_tokens) for n in _MATES)
    if engine.stats().total < needed:
        return False  # too small to check: exact mode then pads, which is always right

    def random_ids(count: int) -> list[int]:
        return torch.randint(engine.info.vocab_size, (count,), generator=generator).tolist()

    def run(ids: Sequence[int], cuts: Sequence[int], mates: Sequence[int]) -> list[Tensor]:
        tables = [engine.allocate(_ROWS), *(engine.allocate(count) for count in mates)]
        others = [
            Item(table, random_ids(count), 0, count)
            for table, count in zip(tables[1:], mates, strict=True)
        ]
        parts: list[tuple[Tensor, Tensor]] = []
        try:
            for start, end in pairwise(cuts):
                own = Item(tables[0], ids[start:end], start, end - start)
                packed = pack([own, *others], page_tokens, 0, 0)
                logits, taps = engine.forward(packed, (last,), torch.float32)
                assert logits is not None and taps is not None
                parts.append((logits[: end - start], taps[: end - start]))
        finally:
            for table in tables:
                table.free()
        return [torch.cat(part) for part in zip(*parts, strict=True)]

    ids = random_ids(_ROWS)
    reference = run(ids, (0, _ROWS), ())
    variants = [run(ids, range(_ROWS + 1), ()), run(ids, (0, 4, _ROWS), _MATES)]
    # Few pages hold fewer: no step can have more rows then.
    room = engine.stats().total - -(-_ROWS // page_tokens)
    for sessions, rows in _CROWDS if engine.info.device.startswith("cuda") else ():
        each = min(rows, engine.info.max_length)
        fitting = min(sessions, room // -(-each // page_tokens))
        variants.append(run(ids, (0, _ROWS), [each] * fitting))
    return all(
        torch.equal(a, b) for variant in variants for a, b in zip(reference, variant, strict=True)
    )

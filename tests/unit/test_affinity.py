"""The index of prompt beginnings: what each worker has cached, in bounded memory."""

from __future__ import annotations

import random

from coordinator.affinity import BLOCK_TOKENS, PrefixIndex


def common(a: list[int], b: list[int]) -> int:
    """Whole blocks that two lists share at their beginnings, in tokens."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return same // BLOCK_TOKENS * BLOCK_TOKENS


def test_matches_are_the_longest_beginnings_that_each_worker_had() -> None:
    rng = random.Random(3)
    for _ in range(50):
        index, known = PrefixIndex(), []
        for owner in (11, 22, 33):
            for _ in range(rng.randrange(1, 4)):
                base = known[0][1] if known and rng.random() < 0.7 else []
                ids = base[: rng.randrange(0, 200)] + [rng.randrange(5) for _ in range(100)]
                known.append((owner, ids))
                index.note(ids, owner)
        wanted = known[0][1][: rng.randrange(200)] + [7] * rng.randrange(80)
        best: dict[int, int] = {}
        for owner, ids in known:
            best[owner] = max(best.get(owner, 0), common(ids, wanted))
        assert index.matches(wanted) == {o: n for o, n in best.items() if n}


def test_a_block_in_the_middle_is_no_beginning() -> None:
    index = PrefixIndex()
    block = list(range(BLOCK_TOKENS))
    index.note([1] * BLOCK_TOKENS + block, 5)
    assert index.matches(block) == {}


def test_short_prompts_are_in_no_block() -> None:
    index = PrefixIndex()
    index.note([1] * (BLOCK_TOKENS - 1), 5)
    assert not len(index) and index.matches([1] * 100) == {}


def test_memory_is_bounded_and_what_is_used_stays() -> None:
    index = PrefixIndex(blocks=100)
    kept = [999] * 3 * BLOCK_TOKENS
    for i in range(500):
        index.note([i] * BLOCK_TOKENS, 1)
        index.note(kept, 2)
    assert len(index) == 100
    assert index.matches(kept) == {2: 3 * BLOCK_TOKENS}
    assert index.matches([0] * BLOCK_TOKENS) == {}

"""Steps with prompts: which fixed shape one takes, what its words say, and that nothing of it is
seen in a result."""

from __future__ import annotations

import random
import subprocess
import sys
from itertools import pairwise

import pytest
import torch

from engine.api import Item, Sampling
from engine.attention.kernels.schedule import HEADER, RECORD
from engine.attention.mode import LayerMode
from engine.attention.torch_sdpa import TorchSdpa
from engine.attention.triton_attn import TritonAttention
from engine.batch import many_slots_of, pack, slots_of
from engine.block_words import Blocks, BlockWords
from engine.kv.cache import KVCache, KVGeometry
from engine.kv.pool import PagePool, PageTable
from engine.ragged_words import RaggedWords, Room
from engine.step_shapes import StepShapes
from tests.engine import interpreted

PAGE, PAGES, SCRATCH = 16, 400, 399 * 16
GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.7, seed=2**63 + 5, top_k=9)
CHECKS = {
    "check_a_llama",
    "check_sliding_windows",
    "check_latent_attention_with_experts",
    "check_a_drafter_beside",
    "check_a_capture_without_memory",
    "check_a_block_without_memory_for_its_graph",
}


def backend_of(kind: type = TritonAttention) -> TritonAttention:
    cache = KVCache(KVGeometry(1, 1, 16, PAGE, torch.bfloat16), PAGES, "cpu")
    found: TritonAttention = kind(cache, 1, [LayerMode()])
    return found


def shapes_of(hidden: int = 576, kind: type = TritonAttention) -> StepShapes:
    return StepShapes(backend_of(kind), hidden, 8, SCRATCH)


def table() -> PageTable:
    return PagePool(PAGES - 1, PAGE).allocate(8 * PAGE)


def step(*asked: tuple[int, int]) -> list[Item]:
    """Items of so many rows and draws."""
    shared = table()
    return [Item(shared, [1] * rows, 0, draws) for rows, draws in asked]


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ([(5, 1)], Room(32, 32, 32)),
        ([(5, 0)], Room(32, 32, 32)),
        ([(32, 1)], Room(32, 32, 32)),
        ([(33, 1)], Room(64, 64, 64)),
        ([(300, 1), *[(1, 1)] * 8], Room(384, 136, 128)),
        ([(300, 1), *[(8, 8)] * 16], Room(512, 136, 512)),
        ([(1024, 0), *[(8, 8)] * 32], Room(1280, 136, 512)),
        ([(1024, 1), *[(8, 8)] * 128], Room(2048, 136, 2048)),
        ([(1025, 1), *[(8, 8)] * 128], None),
        ([(2, 1), *[(1, 1)] * 136], None),
        ([(17, 17)], Room(32, 32, 32)),  # wider than blocks are
        ([(8, 8), (1, 1)], Blocks(2, 8)),
        ([(1, 1)], Blocks(1, 1)),
    ],
)
def test_a_step_takes_the_smallest_shape(
    asked: list[tuple[int, int]], shape: Room | Blocks | None
) -> None:
    items = step(*asked)
    found = shapes_of().words_of(items, ragged=True)
    assert (None if found is None else found.shape) == shape
    without = shapes_of().words_of(items, ragged=False)
    assert isinstance(without, BlockWords) == isinstance(shape, Blocks)


def test_words_of_a_shape_are_kept() -> None:
    shapes = shapes_of()
    first = shapes.words_of(step((9, 1)), True)
    assert first is shapes.words_of(step((20, 0), (2, 2)), True)


def test_large_models_launch_large_steps() -> None:
    """What is launched takes the device longer than the host there."""
    sizes = {hidden: [room.rows for room in shapes_of(hidden).ragged(4096, 1)] for hidden in (
        576, 2048, 4096, 8192,
    )}  # fmt: skip
    assert [found[-1] for found in sizes.values()] == [2048, 1024, 256, 64]
    assert shapes_of(4096).words_of(step((257, 1)), True) is None
    assert sizes[576] == [32, 64, 128, 192, 256, 384, 512, 768, 1024, 1280, 2048]


def test_padding_is_bounded() -> None:
    sizes = [room.rows for room in shapes_of().ragged(4096, 1)]
    assert all(b <= 2 * a for a, b in pairwise(sizes))


def test_what_few_sessions_need() -> None:
    shapes = shapes_of()
    assert len(shapes.ragged(1024 + 64, 64)) == 10
    rooms = shapes.ragged(300, 300)
    assert [room for room in rooms if room.rows == 384] == [
        Room(384, 136, 128),
        Room(384, 136, 384),
    ]
    assert len(rooms) == len(set(rooms))


def test_attention_that_is_planned_anew_has_no_shape() -> None:
    shapes = shapes_of(kind=TorchSdpa)
    assert not shapes.ragged(99, 9) and not shapes.blocks(8, 8)
    assert shapes.words_of(step((5, 1)), True) is None


def mix(rng: random.Random, count: int) -> list[Item]:
    pool, items = PagePool(PAGES - 1, PAGE), []
    rng.shuffle(pool._free)
    for _ in range(count):
        rows = rng.randint(1, 12)
        start, ids = rng.randint(0, 7 * PAGE), [rng.randrange(1000) for _ in range(rows)]
        draws = rng.choice([0, 1, rows])
        items.append(
            Item(pool.allocate(8 * PAGE), ids, start, draws, rng.choice([GREEDY, SAMPLED]))
        )
    return items


def test_padded_words_are_those_of_the_step_and_nothing_besides() -> None:
    """Step after step: what a larger one left behind must not show."""
    rng, backend, room = random.Random(5), backend_of(), Room(64, 16, 48)
    padded, fitted = RaggedWords(backend, SCRATCH, room, 8), RaggedWords(backend, SCRATCH)
    for count in (5, 2, 4, 1, 5):
        items = mix(rng, count)
        assert padded.fill(items) == fitted.fill(items)
        rows, draws = sum(len(i.ids) for i in items), sum(i.draws for i in items)
        assert (padded.rows, padded.used) == (64, rows) and (fitted.rows, fitted.used) == (
            rows,
        ) * 2
        for name, padding in (("ids", 0), ("positions", 0), ("slots", SCRATCH)):
            words = padded.device(name)
            assert words[:rows].equal(fitted.device(name)), name
            assert set(words[rows:].tolist()) <= {padding}, name
        own = fitted.wanted()
        assert (own is None) == (draws == 0)
        wanted = padded.wanted()
        assert wanted is not None and set(wanted[draws:].tolist()) <= {0}
        assert own is None or wanted[:draws].equal(own)
        how, expected = padded.draws(True), fitted.draws(True)
        for name in ("temperature", "seed", "choice", "index", "min_p", "top_k", "top_p"):
            assert getattr(how, name)[:draws].equal(getattr(expected, name)), name
        assert not how.temperature[draws:].any()
        # No item of the attention is of a row behind the step's own.
        attention = padded._words.device("attention")
        at = HEADER + room.spans * 8
        records = attention[at : at + RECORD * int(attention[0])].view(-1, RECORD)
        assert records[:, 0].max() < count and int((records[:, 6] + records[:, 7]).max()) == rows


def test_slots_of_many_rows_are_those_of_each() -> None:
    rng, pages = random.Random(7), [9, 2, 31, 4, 17, 0, 8, 1]
    for _ in range(200):
        start = rng.randrange(8 * PAGE)
        count = rng.randint(0, 8 * PAGE - start)
        expected = [pages[at // PAGE] * PAGE + at % PAGE for at in range(start, start + count)]
        assert slots_of(pages, PAGE, start, count) == expected
        assert many_slots_of(pages, PAGE, start, count).tolist() == expected


@pytest.mark.parametrize("rows", [3, 100])
def test_padding_stands_in_front_as_far_as_there_are_positions(rows: int) -> None:
    shared, minimum = table(), rows + 4
    at, behind = pack([Item(shared, [7] * rows, n, 1) for n in (9, 1)], PAGE, minimum, SCRATCH), 3
    first = [0] * 4 + [7] * rows
    assert at.ids.tolist() == first + [0] + [7] * rows + [0] * behind
    assert at.positions.tolist() == [*range(5, 9 + rows), *range(rows + 4)]
    own = [slots_of(shared.pages, PAGE, n, rows) for n in (9, 1)]
    scratch = [*range(SCRATCH, SCRATCH + 4)]
    assert at.slots.tolist() == scratch + own[0] + scratch[:1] + own[1] + scratch[1:]
    assert at.draw_rows == [3 + rows, minimum + rows]
    assert [(p.first_row, p.width) for p in at.placed] == [(4, minimum), (minimum + 1, minimum)]


def test_tokens_come_back_item_by_item() -> None:
    items = [Item(table(), [7, 4, 5], 0, 3), Item(table(), [1] * 9, 0, 0), Item(table(), [2], 0, 1)]
    for room in (None, Room(64, 16, 48)):
        words = RaggedWords(backend_of(), SCRATCH, room, 8)
        words.fill(items)
        words.tokens[:4] = torch.tensor([4, 6, 8, 9])
        first, none, last = words.matched(items)
        assert (first.tokens, first.accepted) == ((4, 6), 1)
        assert (none.tokens, last.tokens) == ((), (9,))
        logits = torch.arange(48)[:, None]
        assert words.logits_of(items, logits).flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.timeout(400)
def test_no_padding_changes_a_bit() -> None:
    """Real kernels under the interpreter; `prompt_checks` says what of them."""
    found = interpreted.run("tests.engine.prompt_checks")
    assert set(found) == CHECKS and not any(found.values()), found


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_replays_equal_launches() -> None:
    command = [sys.executable, "-m", "tests.engine.prompt_checks"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]

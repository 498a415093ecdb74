"""What an engine meets before there are sessions: nobody waits for it again, no page is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import warm_shapes
from engine.api import Item, Projection, Sampling, WarmUp
from engine.block_words import Blocks
from engine.errors import SettingRefused
from engine.graphs import up_to
from engine.ragged_words import Room
from engine.warm_shapes import prompt_rows
from tests.engine import interpreted
from tests.engine.fake_graphs import FakeGraphs
from tests.load.free_model import LAYERS, FreeEngine

CHECKS = {
    "check_a_draft",
    "check_more_blocks_are_compiled_for_but_not_captured",
    "check_a_draft_with_few_pages",
    "check_a_drafter_in_its_target",
}
GREEDY, FILTERED = Sampling(temperature=0.0), Sampling(temperature=0.8, seed=3, top_k=9)


def engine_of(sessions: int = 8) -> tuple[FreeEngine, FakeGraphs]:
    engine, graphs = FreeEngine(sessions), FakeGraphs()
    assert engine._stepper is not None
    engine._stepper._graphs = graphs
    return engine, graphs


def shapes_of(graphs: FakeGraphs, kind: type[Any]) -> list[Any]:
    """Of the graphs captured, those of that kind."""
    return [key[0] for key in graphs.keys if isinstance(key[0], kind)]  # type: ignore[index]


def once_ns_of(engine: FreeEngine, sessions: int, rows: int, **options: object) -> int:
    """What a step of that shape takes once."""
    tables = [engine.allocate(40 + rows) for _ in range(sessions)]
    for table in tables:
        table.length = 40
    before = engine.once_ns
    engine.step([Item(table, [5] * rows, 40, rows, **options) for table in tables])  # type: ignore[arg-type]
    for table in tables:
        table.free()
    return engine.once_ns - before


def test_no_step_of_a_session_captures_again() -> None:
    engine, graphs = engine_of()
    count = engine.warm_up(WarmUp(sessions=3, widest=6, exports=(1, 2)))
    assert count > len(graphs.keys) == len(set(graphs.keys))
    assert len(shapes_of(graphs, Blocks)) == 4 * (2 * 4 + 2)
    sizes = (32, 64, 128, 192, 256, 384)
    rooms = [Room(rows, min(rows, 136), min(rows, 128)) for rows in sizes]
    assert sorted(shapes_of(graphs, Room)) == sorted(2 * rooms)  # with the rows asked for and not
    for sessions in (1, 2, 3, 4):
        for rows in range(1, 9):
            for sampling in (GREEDY, FILTERED):
                for taps in ((), (1, 2)):
                    if sessions > 2 and sampling is FILTERED:
                        continue
                    found = once_ns_of(engine, sessions, rows, sampling=sampling, taps=taps)
                    assert found == 0, (sessions, rows, sampling, taps)
    assert once_ns_of(engine, 5, 1) and once_ns_of(engine, 1, 9)
    assert once_ns_of(engine, 1, 1, taps=(3,))


class FreeProjection:
    """A projection of no weights; `rows` of each call."""

    info = Projection("draft", (1, 2), 4)

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, taps: tuple[int, ...], tap_rows: Tensor) -> Tensor:
        self.rows.append(len(tap_rows))
        return torch.zeros(len(tap_rows), self.info.width, dtype=torch.bfloat16)


def test_no_step_of_projected_rows_captures_again() -> None:
    engine, _ = engine_of()
    engine._projecting = own = FreeProjection()  # type: ignore[assignment]
    engine._info = replace(engine.info, projection=own.info)
    engine.warm_up(WarmUp(sessions=2, widest=4, exports=(1, 2)))
    # Chunks that are launched too, of every size that has tiles of its own.
    assert set(prompt_rows(engine.info.prefill_chunk)) <= set(own.rows)
    for sessions, rows, sampling in product((1, 2), (1, 3, 4), (GREEDY, FILTERED)):
        options = {"sampling": sampling, "taps": (1, 2)}
        assert once_ns_of(engine, sessions, rows, **options, projected=True) == 0
        # Tap rows are another draft's, which may read the same layers.
        assert once_ns_of(engine, sessions, rows, **options) == 0
        assert once_ns_of(engine, sessions, rows, sampling=sampling) == 0
    assert once_ns_of(engine, 1, 1, taps=(1, 3))


def test_no_prompt_beside_blocks_captures_again() -> None:
    engine, _ = engine_of()
    engine.warm_up(WarmUp(sessions=4, widest=6, exports=(1, 2)))
    before = engine.once_ns
    for prompt in (2, 31, 32, 40, 256):
        for blocks in (0, 1, 4):
            for options in ({}, {"sampling": FILTERED}, {"taps": (1, 2)}):
                tables = [engine.allocate(prompt), *(engine.allocate(6) for _ in range(blocks))]
                items = [Item(tables[0], [5] * prompt, 0, 1, **options)]  # type: ignore[arg-type]
                items += [Item(table, [7] * 6, 0, 6, **options) for table in tables[1:]]  # type: ignore[arg-type]
                found = engine.step(items)
                assert found[0].tokens == (6,) and all(own.tokens == (8,) for own in found[1:])
                assert engine.once_ns == before, (prompt, blocks, options)
                for table in tables:
                    table.free()


def test_a_chunk_and_blocks_may_be_more_than_a_session_has() -> None:
    engine, _ = engine_of()
    engine._info = replace(engine.info, max_length=260)
    engine.warm_up(WarmUp(sessions=4, widest=6))
    before = engine.once_ns
    items = [Item(engine.allocate(256), [5] * 256, 0, 1)]
    items += [Item(engine.allocate(6), [7] * 6, 0, 6) for _ in range(4)]
    engine.step(items)
    assert engine.once_ns == before


class NoMemory(FakeGraphs):
    """There is none for rooms."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[Room] = []

    def _capture(self, key: Any, body: Callable[[], Any]) -> Any:
        if isinstance(key[0], Room):
            body()
            self.refused.append(key[0])
            raise torch.OutOfMemoryError
        return super()._capture(key, body)


def test_a_prompt_whose_graph_finds_no_memory_is_launched() -> None:
    """As it would be without graphs; and it is not tried again."""
    engine, graphs = FreeEngine(8), NoMemory()
    assert engine._stepper is not None
    engine._stepper._graphs = graphs
    for _ in range(2):
        called: list[int] = []
        items = [Item(engine.allocate(40), [*range(40)], 0, 1), Item(engine.allocate(3), [7], 0, 1)]
        found = engine.step(items, lambda called=called: called.append(1))
        assert [own.tokens for own in found] == [(40,), (8,)] and called == [1]
    assert graphs.refused == [Room(64, 64, 64)]
    # Others are.
    engine.step([Item(engine.allocate(9), [*range(9)], 0, 1)])
    assert graphs.refused[1:] == [Room(32, 32, 32)]


def test_no_page_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = engine_of()
    with caplog.at_level("INFO"):
        count = engine.warm_up(WarmUp(sessions=8, widest=8))
    assert f"warmed {count} step shapes in " in caplog.text
    stats = engine.stats()
    assert (stats.free, stats.tables) == (stats.total, 0)
    engine.check_integrity()


def test_what_has_no_pages_is_left_out() -> None:
    engine, graphs = engine_of()
    whole = engine.warm_up(WarmUp(sessions=4, widest=2))
    few, few_graphs = engine_of()
    held = few.allocate((few.stats().total - 3) * 16)
    assert 0 < few.warm_up(WarmUp(sessions=4, widest=2)) < whole
    # Three sessions find pages, but there is no graph of three.
    few_batches, batches = (
        {shape.batch for shape in shapes_of(found, Blocks)} for found in (few_graphs, graphs)
    )
    assert few_batches == {1, 2} < batches == {1, 2, 4}
    # Nor do prompts of more rows than three pages have.
    assert {room.rows for room in shapes_of(few_graphs, Room)} == {32}
    held.free()
    none, graphs = engine_of()
    held = none.allocate(none.stats().total * 16)
    assert none.warm_up(WarmUp(sessions=4, widest=2)) == 0 and not graphs.keys
    held.free()
    none.check_integrity()


def test_more_sessions_are_compiled_for_but_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, graphs = engine_of(64)
    run: list[tuple[int, int, bool]] = []
    prompts: list[tuple[int, int, bool]] = []
    plain = engine._step

    def step(items, launched=None, capture=True):  # type: ignore[no-untyped-def]
        kept = run if items[0].draws == len(items[0].ids) else prompts
        kept.append((len(items), len(items[0].ids), capture))
        return plain(items, capture=capture)

    monkeypatch.setattr(engine, "_step", step)
    engine.warm_up(WarmUp(sessions=2, widest=4))
    assert {(n, rows) for n, rows, capture in run if not capture} == {
        (n, rows) for n in (4, 8, 16, 24, 32, 48, 64) for rows in (1, 2, 4)
    } | {(96, 1), (96, 2), (96, 4), (128, 1), (128, 2), (128, 4)}
    assert {shape.batch for shape in shapes_of(graphs, Blocks)} == {1, 2}
    # Of prompts those of more rows and draws than a chunk beside two blocks has.
    assert [rows for _, rows, capture in prompts if not capture] == [768, 512, 384, 256, 192]
    assert {room.rows for room in shapes_of(graphs, Room)} == {32, 64, 128, 192, 256, 384}


def test_sessions_that_are_not_drafted_for_have_graphs_of_their_own() -> None:
    def kinds(wanted: WarmUp, sessions: int, projected: tuple[int, ...] = ()) -> list[Any]:
        found = warm_shapes._kinds(wanted, sessions, projected)
        return [(kind.taps, kind.projected, kind.drafted, kind.filtered) for kind in found]

    wanted, taps = WarmUp(sessions=8, widest=1, exports=(0, 1), apart=True), (0, 1)
    assert kinds(wanted, 2) == [
        (which, False, drafted, filtered)
        for drafted in (True, False)
        for which in (taps, ())
        for filtered in (False, True)
    ]
    assert kinds(wanted, 4) == [
        (which, False, drafted, False) for drafted in (True, False) for which in (taps, ())
    ]
    assert kinds(WarmUp(8, 1), 8) == [((), False, True, False), ((), False, True, True)]
    # Projected rows beside tap rows, which another draft may read.
    both = [((2, 3), True), (taps, False), ((), False)]
    assert kinds(WarmUp(8, 1, taps), 8, (2, 3)) == [(*rows, True, False) for rows in both]


@pytest.mark.parametrize(("independent", "modes"), [(True, {True}), (False, {False})])
def test_what_need_not_be_exact_runs_where_other_kernels_do(
    independent: bool, modes: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exact sessions run alone where rows depend on each other, and their blocks are prompts."""
    stepper = engine_of()[0]._stepper
    assert stepper is not None
    monkeypatch.setattr(type(stepper), "loose", lambda _, rows: rows >= 64)
    found: dict[tuple[int, int], set[bool]] = {}
    for shape in warm_shapes.shapes(stepper, WarmUp(8, 8), 64, independent, 8192):
        if shape.draws == shape.rows and shape.captured:
            found.setdefault((shape.sessions, shape.rows), set()).add(shape.exact)
    assert found.pop((8, 8)) == modes | {False}
    alone = [found.pop((1, rows)) for rows in (1, 2, 4, 8)]
    assert alone == [{True} if independent else {True, False}] * 4
    assert all(own == modes for own in found.values()) and len(found) == 11


def test_an_engine_without_graphs_or_kernels_of_its_own_runs_nothing() -> None:
    engine, _ = engine_of()
    engine._stepper = None
    assert engine.warm_up(WarmUp(sessions=8, widest=8)) == 0 and engine.steps == 0


@pytest.mark.parametrize("layers", [(LAYERS,), (2, 1), (1, 1), (-1,)])
def test_layers_that_are_not_there_are_refused(layers: tuple[int, ...]) -> None:
    engine, _ = engine_of()
    with pytest.raises(SettingRefused, match=f"warm_taps.*layers 0 to {LAYERS - 1}, rising"):
        engine.warm_up(WarmUp(sessions=1, widest=1, exports=layers))


def test_chunks_cover_every_size_of_tiles() -> None:
    assert prompt_rows(256) == [5, 24, 48, 64, 96, 128, 192, 256, 320]
    assert prompt_rows(16) == [5, 16, 20]
    assert prompt_rows(1) == [1]


def test_sizes_that_are_taken() -> None:
    assert up_to((1, 2, 4, 8), 3) == (1, 2, 4) and up_to((1, 2, 4, 8), 4) == (1, 2, 4)
    assert up_to((1, 2), 9) == (1, 2) and up_to((1, 2), 0) == ()


@pytest.mark.timeout(300)
def test_kernels_under_the_interpreter() -> None:
    """Real kernels and drafts; `warm_checks` says what of them."""
    found = interpreted.run("tests.engine.warm_checks")
    assert set(found) == CHECKS and not any(found.values()), found


@pytest.mark.timeout(300)
def test_no_step_waits_for_a_compiler() -> None:
    found = interpreted.run("tests.engine.specialisation_checks")
    assert list(found) == ["check_no_step_compiles_a_kernel_after_warming"], found
    assert not any(found.values()), found

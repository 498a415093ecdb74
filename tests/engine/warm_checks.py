"""Warming up with real kernels, engines and drafts; `interpreted` runs the checks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from draft_svc.colocated import BlockDrafter
from draft_svc.methods.base import Request
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.first_runs import first_runs
from engine import block_step, step_shapes, warm_shapes
from engine.api import Ask, Item, Sampling, WarmUp
from engine.block_step import BlockStepper, CallShape
from engine.config import EngineConfig
from engine.kv.pool import PoolStats
from engine.runner import NativeEngine
from tests.engine.fake_graphs import FakeGraphs
from tests.service.block_draft_check import TRITON, drafts, opened
from tests.service.colocated_draft_check import tiny_pair

GREEDY = Sampling(temperature=0.0)
FILTERED = Sampling(temperature=0.9, seed=7, top_k=20, top_p=0.9)


@contextmanager
def few_shapes() -> Iterator[None]:
    """The interpreter takes its time."""
    kept = [
        (module, name, getattr(module, name))
        for module, names in (
            (step_shapes, ("_BATCHES", "_ROWS")),
            (block_step, ("_BATCHES", "_MOST_ROWS")),
            (warm_shapes, ("_DRAWS", "_MOST_ROWS")),
        )
        for name in names
    ]
    step_shapes._BATCHES = block_step._BATCHES = (1, 2)
    step_shapes._ROWS = (18,)
    warm_shapes._DRAWS, warm_shapes._MOST_ROWS, block_step._MOST_ROWS = (), 0, 0
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)


def steppers_with_graphs(engine: NativeEngine) -> FakeGraphs:
    assert engine._stepper is not None
    engine._stepper._graphs = graphs = FakeGraphs()
    return graphs


def empty(stats: PoolStats) -> bool:
    return stats.free == stats.total and not stats.tables


def check_a_draft() -> None:
    with few_shapes(), drafts("zlab", TRITON) as (method,):
        stepper = _with_graphs(method)
        shapes = stepper.shapes(1, 2)
        assert [tuple(shape) for shape in shapes] == [
            (1, 2, False, True), (1, 1, False, True), (1, 2, True, True), (1, 1, True, True),
        ]  # fmt: skip
        first_runs(method, method._filled, shapes, (3,))
        assert empty(method.stats())
        before = method.once_ns
        assert before > 0
        for sampling, k in ((GREEDY, 1), (FILTERED, 2)):
            context = opened(method, 2, sampling)
            assert len(method.propose([Request(context, k)])[0].ids) == k
            method.close(context)
        assert method.once_ns == before
        method.check_integrity()


def check_more_blocks_are_compiled_for_but_not_captured() -> None:
    with few_shapes(), drafts("zlab", TRITON) as (method,):
        block_step._MOST_ROWS = 2 * method.info.block_size
        graphs = _with_graphs(method)._graphs
        assert isinstance(graphs, FakeGraphs) and method._stepper is not None
        shapes = method._stepper.shapes(1, 1)
        assert shapes[0] == CallShape(2, 1, False, captured=False) and len(shapes) == 3
        run: list[tuple[int, bool]] = []
        plain = method._stepper._run

        def recorded(wanted: Any, chances: bool, capture: bool) -> Any:
            run.append((len(wanted), capture))
            return plain(wanted, chances, capture)

        method._stepper._run = recorded  # type: ignore[method-assign]
        first_runs(method, method._filled, shapes)
        assert run == [(2, False), (1, True), (1, True)]
        assert graphs.keys == [(1, 1, False, True), (1, 1, True, True)]
        assert empty(method.stats())


def check_a_draft_with_few_pages() -> None:
    with few_shapes(), drafts("zlab", TRITON | {"kv_pages": 6}) as (method,):
        stepper = _with_graphs(method)
        graphs = stepper._graphs = FakeGraphs()
        first_runs(method, method._filled, [CallShape(2, 1, False), CallShape(1, 1, False)])
        assert empty(method.stats()) and graphs.keys == [(1, 1, False, True)]


def check_a_drafter_in_its_target() -> None:
    config = EngineConfig(
        dtype="float32", kv_pages=16, max_length=64, prefill_chunk=5, kernels="triton",
        attention_backend="TRITON_ATTN",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, few_shapes():
        engine, drafter = tiny_pair(folder, config)
        steppers_with_graphs(engine)
        _with_graphs(drafter._method)
        first_runs(drafter._method, drafter._filled, [CallShape(1, 2, False)])
        engine.warm_up(WarmUp(sessions=1, widest=1))
        assert empty(engine.stats())
        before = engine.once_ns, drafter.once_ns
        assert all(before)
        propose_behind_a_prompt(engine, drafter)
        assert (engine.once_ns, drafter.once_ns) == before
        engine.check_integrity()


def propose_behind_a_prompt(engine: NativeEngine, drafter: BlockDrafter) -> None:
    table, text = engine.allocate(0), list(range(3, 14))
    text += engine.step([Item(table, text, 0, 1, GREEDY, context=text)])[0].tokens
    text += engine.step([Item(table, text[-1:], 11, 1, GREEDY, context=text)])[0].tokens
    assert len(drafter.propose([Ask(table, text[-1], 2, GREEDY)])[0].ids) == 2
    table.free()


def _with_graphs(method: DFlashMethod) -> BlockStepper:
    assert method._stepper is not None
    method._stepper._graphs = FakeGraphs()
    return method._stepper

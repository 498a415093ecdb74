"""Rows taken in by the graphs of padded sizes against rows taken in launch by launch, bit for bit.

python -m tests.engine.context_checks     on a GPU with graphs; test_context_writer.py runs the
checks under the interpreter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.dflash_context import DFlashContext
from engine.api import Sampling
from engine.models import draft_context
from engine.models.draft_context import Bits, ContextRows, ContextWriter, RowShape
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.latent_draft_checks import DFLASH, checkpoints
from tests.engine.latent_draft_checks import TRITON as TRITON_MLA
from tests.engine.test_dialects import CASES
from tests.engine.tiny import write_llama
from tests.service.block_draft_check import TRITON, written
from tests.service.test_draft_dialects import load

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # the interpreter takes its time
    draft_context.CAPTURED_ROWS = (1, 2, 4, 8)
SIZES = draft_context.CAPTURED_ROWS
PAGES: dict[str, Any] = {"kv_pages": 96, "confidences": False}
# Rows of each session, and whether they are projected.
ROUNDS = (
    ((1, 0, 0), False),
    ((3, 0, 0), False),
    ((2, 5, 1), False),
    ((1, 2, 0), True),
    ((5, 3, 1), False),
    ((4, 2, 1), True),
    ((1, 1, 1), False),
)
MANY = (((30, 20, 14), False), ((9, 9, 9), True), ((40, 20, 5), False), ((1, 2, 0), False))


def pair(draft: Path, target: Path, method: str, how: dict[str, Any]) -> list[DFlashMethod]:
    """The draft with graphs for rows, and without."""
    device = "cuda" if ON_GPU else "cpu"
    found = []
    for mode in ("auto", "NONE"):
        settings = how | PAGES | {"device": device, "cuda_graph_mode": mode}
        found.append(load(draft, target, method, **settings))
    assert isinstance(found[0], DFlashMethod) and isinstance(found[1], DFlashMethod)
    if not ON_GPU:
        writer_of(found[0])._graphs = FakeGraphs()
    found[0]._model.capture_writes()
    found[1]._model.capture_writes()
    return found


def writer_of(method: DFlashMethod) -> ContextWriter:
    assert method._model._writer is not None
    return method._model._writer


def recorded(writer: ContextWriter) -> list[Hashable]:
    """The keys of the graphs that are played from now on."""
    keys: list[Hashable] = []
    play = writer._graphs.run

    def run(key: Hashable, *others: Any, **options: Any) -> None:
        keys.append(key)
        play(key, *others, **options)

    writer._graphs.run = run  # type: ignore[method-assign]
    return keys


def rows_of(method: DFlashMethod, count: int, projected: bool) -> Bits:
    """Random rows as they come over the wire."""
    info = method.info.rows
    assert info is not None
    generator = torch.Generator().manual_seed(count)
    width = info.projected_width if projected else info.width
    rows = torch.randn(count, width, generator=generator).bfloat16()
    return rows.view(torch.uint16).numpy()


def take(
    method: DFlashMethod, contexts: Sequence[DFlashContext], counts: Sequence[int], projected: bool
) -> None:
    writes = [
        ContextRows(
            c.table, c.table.length, rows_of(method, count + at, projected)[at:], 0, projected
        )
        for at, (c, count) in enumerate(zip(contexts, counts, strict=True))
        if count
    ]
    method._model.write_contexts(writes)


def compare(draft: Path, target: Path, method: str, how: dict[str, Any]) -> None:
    graphs, launched = pair(draft, target, method, how)
    writer = writer_of(graphs)
    assert len(writer._graphs._captured) == 2 * len(SIZES)
    assert not writer_of(launched)._graphs._captured and not writer_of(launched)._fixed
    captured = list(writer._graphs._captured)
    keys = recorded(writer)
    ours, theirs = (
        [own.open([3] * 4, Sampling(temperature=0.0)) for _ in range(3)]
        for own in (graphs, launched)
    )
    for counts, projected in ROUNDS + MANY if ON_GPU else ROUNDS:
        keys.clear()
        for own, contexts in ((graphs, ours), (launched, theirs)):
            take(own, contexts, counts, projected)
        played = [size for size in SIZES if size >= sum(counts)][:1]
        assert [key.rows for key in keys if isinstance(key, RowShape)] == played, keys
        assert all(isinstance(key, RowShape) and key.projected is projected for key in keys)
        for a, b in zip(ours, theirs, strict=True):
            found, expected = written(graphs, a), written(launched, b)
            assert found.shape[1] == a.table.length == b.table.length
            assert torch.equal(found, expected), (counts, projected)
    assert list(writer._graphs._captured) == captured  # a session captures nothing
    mixed(graphs, launched, ours, theirs)
    for own, contexts in ((graphs, ours), (launched, theirs)):
        for context in contexts:
            own.close(context)
        own.check_integrity()


def mixed(
    graphs: DFlashMethod,
    launched: DFlashMethod,
    ours: Sequence[DFlashContext],
    theirs: Sequence[DFlashContext],
) -> None:
    """Sessions whose rows differ, in one call; rows of another form have no graph."""
    for own, contexts in ((graphs, ours), (launched, theirs)):
        own._model.write_contexts(
            [
                ContextRows(c.table, c.table.length, rows_of(own, 2, projected), 0, projected)
                for c, projected in zip(contexts, (True, False, True), strict=True)
            ]
        )
        wire = ContextRows(contexts[0].table, contexts[0].table.length, rows_of(own, 3, False))
        own._model.write_contexts([replace(wire, rows=wire.tensor().float())])
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(written(graphs, a), written(launched, b))


def check_heads() -> None:
    """Of DFlash, and of DSpark."""
    for name, method in (("zlab", "dflash"), ("deepspec", "dspark")):
        with tempfile.TemporaryDirectory() as folder:
            target, draft = Path(folder, "target"), Path(folder, "draft")
            write_llama(target)
            CASES[name].write(draft, target)
            compare(draft, target, method, TRITON)


def check_latent() -> None:
    with checkpoints(DFLASH) as (target, draft):
        compare(draft, target, "dflash", TRITON_MLA)


def check_no_memory_for_a_graph() -> None:
    """Those rows are launched, and nobody misses any."""

    class Short(FakeGraphs):
        def _capture(self, key: Hashable, body: Any) -> Any:
            assert isinstance(key, RowShape)
            if key.rows == 4:
                raise torch.OutOfMemoryError
            return super()._capture(key, body)

    with checkpoints(DFLASH) as (target, draft):
        graphs, launched = pair(draft, target, "dflash", TRITON_MLA)
        writer_of(graphs)._graphs = short = Short()
        graphs._model.capture_writes()
        assert len(short.keys) == 2 * (len(SIZES) - 1)
        contexts = [own.open([3] * 4, Sampling(temperature=0.0)) for own in (graphs, launched)]
        for own, context in zip((graphs, launched), contexts, strict=True):
            take(own, [context], [3], False)
        assert torch.equal(written(graphs, contexts[0]), written(launched, contexts[1]))


if __name__ == "__main__":
    assert ON_GPU, "needs a GPU; tests/engine/test_context_writer.py runs the checks elsewhere"
    for check in (check_heads, check_latent, check_no_memory_for_a_graph):
        check()
        print(f"{check.__name__}: equal", flush=True)

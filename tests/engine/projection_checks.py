"""Rows through a draft's `fc` and norm, against the equation in fp64.

python -m tests.engine.projection_checks     on a GPU with graphs; test_projected_rows.py runs the
check under the interpreter.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.api import Item, ItemResult, Sampling
from engine.config import EngineConfig
from engine.graphs import StepGraphs
from engine.kv.pool import PageTable
from engine.loading import load_engine
from engine.runner import NativeEngine
from tests.engine.draft_reference import norm
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.test_dialects import CASES
from tests.engine.tiny import write_llama

ON_GPU = torch.cuda.is_available()
GREEDY = Sampling(temperature=0.0)
PROMPT = [5, 6, 7, 8, 9]


def load(target: Path, draft: Path, kernels: str) -> NativeEngine:
    """A random Llama that has the projection of a random draft; their files are written."""
    write_llama(target)
    CASES["zlab"].write(draft, target)
    config = EngineConfig(
        model=str(target), dtype="float32", kv_pages=16, max_length=64, kernels=kernels,
        device="cuda" if ON_GPU else "cpu",
    )  # fmt: skip
    if kernels == "triton":
        config = replace(config, attention_backend="TRITON_ATTN")
    return load_engine(config, projected=draft)


def projected(draft: Path, rows: Tensor) -> Tensor:
    """RMSNorm(fc(rows)) in fp64."""
    state = load_file(draft / "model.safetensors")
    fc, weight = (state[name].double() for name in ("fc.weight", "hidden_norm.weight"))
    return norm(rows.double() @ fc.T, weight)


def close(found: ItemResult, expected: Tensor) -> bool:
    assert found.rows is not None and found.rows.dtype is torch.bfloat16
    return found.rows.shape == expected.shape and bool(
        torch.allclose(found.rows.double(), expected, rtol=2e-2, atol=2e-2)
    )


def together(
    engine: NativeEngine, draft: Path, ids: Sequence[int], tables: list[PageTable]
) -> None:
    """One step of three sessions alike: projected rows, those they are made of, and others."""
    info = engine.info.projection
    assert info is not None
    first, other = tables[0].length, tuple({0, 1, 2, 3} - set(info.taps))[:1]
    a, b, c = (
        Item(table, ids, first, len(ids), GREEDY, taps=taps, projected=own)
        for table, taps, own in zip(
            tables, (info.taps, info.taps, other), (True, False, False), strict=True
        )
    )
    mixed = engine.step([a, b, c])
    valid = mixed[0].accepted + 1
    raw, others = mixed[1].rows, mixed[2].rows
    assert raw is not None and others is not None
    expected = projected(draft, raw)
    assert len(raw) == valid and close(mixed[0], expected)
    assert others.shape == (valid, engine.info.hidden_size)
    # Alone, where no other rows are asked for, and again: a graph is played.
    for _ in range(2):
        alone = engine.step([a])[0]
        assert alone.tokens == mixed[0].tokens and close(alone, expected)
        plain = engine.step([b])[0].rows
        assert plain is not None and torch.equal(plain, raw)


def check_rows(kernels: str = "triton") -> None:
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        engine = load(target, draft, kernels)
        info, stepper = engine.info.projection, engine._stepper
        assert info is not None and info.taps == (0, 2)
        if stepper is not None:
            stepper._graphs = StepGraphs("step", True) if ON_GPU else FakeGraphs()
        tables = [engine.allocate(0) for _ in range(3)]
        prompts = [Item(t, PROMPT, 0, 1, GREEDY, taps=info.taps, projected=True) for t in tables]
        together(engine, draft, PROMPT, tables)
        for table in tables:
            table.truncate(0)
        token = engine.step(prompts)[0].tokens[-1]
        together(engine, draft, [token, 3, 4], tables)
        for table in tables:
            table.truncate(len(PROMPT))
        raw_first(engine, draft, [token, 3], tables[:2])
        if stepper is not None:
            assert len(stepper._graphs._captured) > 4
        scored(engine, draft, engine.allocate(0))


def raw_first(
    engine: NativeEngine, draft: Path, ids: Sequence[int], tables: list[PageTable]
) -> None:
    """A shape is met with tap rows, then with projected ones: they are steps of their own."""
    info = engine.info.projection
    assert info is not None
    raw = [Item(t, ids, len(PROMPT), len(ids), GREEDY, taps=info.taps) for t in tables]
    for items in (raw, raw[:1]):
        rows = [found.rows for found in engine.step(items)]
        made = engine.step([item._replace(projected=True) for item in items])
        for before, after in zip(rows, made, strict=True):
            assert before is not None and close(after, projected(draft, before))


def scored(engine: NativeEngine, draft: Path, table: PageTable) -> None:
    """A prompt whose tokens are scored too, from rows in full precision."""
    info = engine.info.projection
    assert info is not None
    item = Item(
        table, PROMPT, 0, 1, GREEDY, taps=info.taps,
        context=PROMPT, prompt_len=len(PROMPT), prompt_logprobs=1,
    )  # fmt: skip
    plain, found = engine.step([item])[0], engine.step([item._replace(projected=True)])[0]
    assert plain.rows is not None and close(found, projected(draft, plain.rows))
    assert found.prompt_logprobs == plain.prompt_logprobs and len(found.prompt_logprobs) == 4


if __name__ == "__main__":
    assert ON_GPU, "needs a GPU; tests/engine/test_projected_rows.py runs under the interpreter"
    check_rows()
    print("projected rows: equal")

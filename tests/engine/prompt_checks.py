"""Steps with prompts in a fixed shape against the same ones launched, bit for bit: tokens, rows of
tap layers, and every page of the cache.

python -m tests.engine.prompt_checks     on a GPU with graphs; test_prompt_steps.py runs the checks
under the interpreter, smaller, where memory that nothing has written is no number.
"""

from __future__ import annotations

import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from engine import step_shapes
from engine.api import Item, ItemResult, Sampling
from engine.config import EngineConfig
from engine.graphs import StepGraphs
from engine.kv.latent import LatentCache
from engine.ragged_words import Room
from engine.runner import NativeEngine
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.latent_engine_checks import VARIANTS
from tests.engine.test_dialects import CASES
from tests.engine.tiny import load_tiny, write_llama, write_model
from tests.service.colocated_draft_check import pair, rounds

ON_GPU = torch.cuda.is_available()
KINDS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9, seed=2**63 + 5, top_k=20, top_p=0.9),
    Sampling(temperature=1.2, seed=3, choice=2, min_p=0.05),
    Sampling(temperature=0.7, seed=11),
)
# Rows that a prompt's chunk has, and mixes tried of each.
SIZES = (7, 40, 100, 150, 300, 700) if ON_GPU else (3, 12, 25)
MIXES = 6 if ON_GPU else 3
LONGEST, PAGES = (2048, 600) if ON_GPU else (96, 40)


class Unwritten(TorchFunctionMode):
    """Memory that is asked for holds what no sum survives."""

    _asked: ClassVar[set[Callable[..., Any]]] = {
        torch.empty, torch.empty_like, torch.Tensor.new_empty,
    }  # fmt: skip

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._asked and made.is_floating_point():
            made.fill_(torch.nan)
        return made


@contextmanager
def small_rooms() -> Iterator[None]:
    """The interpreter takes its time."""
    kept = step_shapes._ROWS, step_shapes._DRAWS, step_shapes._SPANS
    if not ON_GPU:
        step_shapes._ROWS, step_shapes._DRAWS, step_shapes._SPANS = (18, 34), (6, 24), 5
    try:
        yield
    finally:
        step_shapes._ROWS, step_shapes._DRAWS, step_shapes._SPANS = kept


@contextmanager
def launched(engine: NativeEngine) -> Iterator[None]:
    """No step with prompts is padded meanwhile."""
    stepper = engine._stepper
    assert stepper is not None
    kept, stepper._graphs = stepper._graphs, StepGraphs("none", False)
    try:
        yield
    finally:
        stepper._graphs = kept


def graphs_of(engine: NativeEngine) -> StepGraphs[Any]:
    assert engine._stepper is not None
    if not ON_GPU:
        engine._stepper._graphs = FakeGraphs()
    return engine._stepper._graphs


def pages_of(engine: NativeEngine) -> list[torch.Tensor]:
    """All of the target's cache but the page that belongs to no session, by reference."""
    cache: Any = engine._cache
    every = [cache.data] if isinstance(cache, LatentCache) else [*cache.k, *cache.v]
    size = cache.page_count
    axes = [tensor.shape.index(size) for tensor in every]
    return [t.narrow(axis, 0, size - 1) for t, axis in zip(every, axes, strict=True)]


def mix(rng: random.Random, engine: NativeEngine, chunk: int, taps: tuple[int, ...]) -> list[Item]:
    """A prompt's chunk of so many rows, beside others, blocks and single tokens in any order; each
    behind a context of its own."""
    items, asked = [], [(chunk, rng.choice([0, 1]))]
    if rng.random() < 0.5:
        rows = rng.randint(1, 4)
        asked.append((rows, rng.randint(0, 1)))
    asked += [(rows, rows) for rows in (rng.randint(1, 3) for _ in range(rng.randint(0, 3)))]
    rng.shuffle(asked)
    for rows, draws in asked:
        start = rng.choice([0, rng.randint(1, 40)])
        table = engine.allocate(start + rows)
        if start:
            ids = [rng.randrange(3, 90) for _ in range(start)]
            engine.step([Item(table, ids, 0, 0)])
        ids, kind = [rng.randrange(3, 90) for _ in range(rows)], rng.choice(KINDS)
        items.append(Item(table, ids, start, draws, kind, taps=rng.choice([(), taps])))
    return items


def same(one: Sequence[ItemResult], other: Sequence[ItemResult]) -> bool:
    for a, b in zip(one, other, strict=True):
        rows = (a.rows is None) == (b.rows is None)
        if rows and a.rows is not None and b.rows is not None:
            rows = torch.equal(a.rows, b.rows)
        if not rows or (a.tokens, a.accepted, a.width) != (b.tokens, b.accepted, b.width):
            return False
    return True


@torch.inference_mode()
def compare(engine: NativeEngine, taps: tuple[int, ...], seed: int = 0) -> None:
    rng, graphs = random.Random(seed), graphs_of(engine)
    rooms, replays = set[Room](), 0
    for size in SIZES:
        for number in range(MIXES):
            with launched(engine):
                items = mix(rng, engine, size, taps)
                before = [page.clone() for page in pages_of(engine)]
                expected = engine.step(items)
                written = [page.clone() for page in pages_of(engine)]
            for page, kept in zip(pages_of(engine), before, strict=True):
                page.copy_(kept)
            known = set(graphs._captured)
            if ON_GPU:
                found = engine.step(items)
            else:
                with Unwritten():
                    found = engine.step(items)
            told = [(len(item.ids), item.start, item.draws) for item in items]
            assert same(found, expected), (size, number, told)
            for page, wanted in zip(pages_of(engine), written, strict=True):
                assert torch.equal(page.view(torch.uint8), wanted.view(torch.uint8)), told
            new = set(graphs._captured) - known
            rooms |= {key[0] for key in new if isinstance(key[0], Room)}  # type: ignore[index]
            replays += not new
            for item in items:
                item.table.free()
    assert replays and any(room.rows >= max(SIZES) for room in rooms), (replays, rooms)
    print(f"{len(SIZES) * MIXES} steps equal, {replays} of them replays, {len(rooms)} rooms")
    engine.check_integrity()


def check_a_llama() -> None:
    with tempfile.TemporaryDirectory() as folder, small_rooms():
        write_llama(Path(folder), num_hidden_layers=2, max_position_embeddings=LONGEST)
        compare(tiny(folder, "TRITON_ATTN"), (0, 1))


def check_sliding_windows() -> None:
    with tempfile.TemporaryDirectory() as folder, small_rooms():
        write_model(
            Path(folder), "mistral", num_hidden_layers=1, sliding_window=9, head_dim=16,
            max_position_embeddings=LONGEST,
        )  # fmt: skip
        compare(tiny(folder, "TRITON_ATTN"), (0,), 1)


def check_latent_attention_with_experts() -> None:
    family, options = VARIANTS["v3"]
    with tempfile.TemporaryDirectory() as folder, small_rooms():
        write_model(Path(folder), family, **options, num_hidden_layers=1)
        compare(tiny(folder, "TRITON_MLA", max_length=min(LONGEST, 256)), (0,), 2)


def tiny(folder: str, backend: str, **options: Any) -> NativeEngine:
    device = "cuda" if ON_GPU else "cpu"
    given = {"max_length": LONGEST, "kv_pages": PAGES, "device": device} | options
    engine = load_tiny(Path(folder), "triton", attention_backend=backend, **given)
    assert engine.rows_independent
    return engine


def check_a_drafter_beside() -> None:
    """It reads rows and writes its context at the places of the padded step; one session is not
    drafted for and exports rows."""
    prompts = [list(range(3, 14)), list(range(20, 25))]
    device = "cuda" if ON_GPU else "cpu"
    config = EngineConfig(
        dtype="float32", kv_pages=16, max_length=64, kernels="triton", device=device,
        attention_backend="TRITON_ATTN",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, small_rooms():
        target, draft = Path(folder, "target"), Path(folder, "draft")
        write_llama(target)
        CASES["zlab"].write(draft, target)
        options: dict[str, Any] = {"attention_backend": "TRITON_ATTN"}
        engine, drafter = pair(target, draft, "dflash", config, **options)
        for own in (False, True):
            graphs = graphs_of(engine)
            found = rounds(engine, drafter, prompts, KINDS[0], 1, own)
            rooms = [key[0] for key in graphs._captured if isinstance(key[0], Room)]  # type: ignore[index]
            assert rooms
            with launched(engine):
                assert rounds(engine, drafter, prompts, KINDS[0], 1, own) == found


def main() -> None:
    assert ON_GPU, "needs a GPU; tests/engine/test_prompt_steps.py runs under the interpreter"
    wrong = 0
    for name, check in list(globals().items()):
        if not name.startswith("check_"):
            continue
        began = time.monotonic()
        try:
            check()
            print(f"{name}: equal, {time.monotonic() - began:.0f} s", flush=True)
        except Exception:
            wrong += 1
            print(f"{name}: WRONG\n{traceback.format_exc()}", flush=True)
    print("all equal" if not wrong else f"{wrong} wrong")
    raise SystemExit(wrong)


if __name__ == "__main__":
    main()

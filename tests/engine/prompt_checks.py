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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from engine import step_shapes
from engine.api import Item, WarmUp
from engine.config import EngineConfig
from engine.graphs import StepGraphs
from engine.ragged_words import Room
from engine.runner import NativeEngine
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.latent_engine_checks import VARIANTS
from tests.engine.prompt_mixes import (
    KINDS,
    MOST_BEFORE,
    Unwritten,
    launched,
    mix,
    pages_of,
    same,
)
from tests.engine.tiny import load_tiny, write_llama, write_model
from tests.service.colocated_draft_check import rounds, tiny_pair

ON_GPU = torch.cuda.is_available()
# Rows that a prompt's chunk has, and mixes tried of each.
SIZES = (7, 40, 100, 150, 300, 700) if ON_GPU else (3, 12, 25)
MIXES = 6 if ON_GPU else 3
LONGEST, PAGES = (2048, 600) if ON_GPU else (96, 40)


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


def graphs_of(engine: NativeEngine) -> StepGraphs[Any]:
    """None is captured yet; on a GPU most kernels are compiled, side by side."""
    assert engine._stepper is not None
    if ON_GPU:
        engine.warm_up(WarmUp(sessions=1, widest=1))
    engine._stepper._graphs = StepGraphs("step", True) if ON_GPU else FakeGraphs()
    return engine._stepper._graphs


@torch.inference_mode()
def compare(engine: NativeEngine, taps: tuple[int, ...], seed: int = 0) -> None:
    rng, graphs = random.Random(seed), graphs_of(engine)
    rooms, replays = set[Room](), 0
    sizes = [size for size in SIZES if size + MOST_BEFORE <= engine.info.max_length]
    for size in sizes:
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
    assert replays and any(room.rows >= sizes[-1] for room in rooms), (replays, rooms)
    print(f"{len(sizes) * MIXES} steps equal, {replays} of them replays, {len(rooms)} rooms")
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
        engine, drafter = tiny_pair(folder, config)
        for own in (False, True):
            graphs = graphs_of(engine)
            found = rounds(engine, drafter, prompts, KINDS[0], 1, own)
            rooms = [key[0] for key in graphs._captured if isinstance(key[0], Room)]  # type: ignore[index]
            assert rooms
            with launched(engine):
                assert rounds(engine, drafter, prompts, KINDS[0], 1, own) == found


@contextmanager
def no_memory(graphs: StepGraphs[Any]) -> Iterator[None]:
    """In the middle of a capture: on a GPU its own allocator says so."""
    capture = graphs._capture

    def short(key: Any, body: Any) -> Any:
        def wanting() -> Any:
            outputs = body()
            if not ON_GPU:
                raise torch.OutOfMemoryError
            if torch.cuda.is_current_stream_capturing():
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
            return outputs

        return capture(key, wanting)

    graphs._capture = short  # type: ignore[method-assign]
    try:
        yield
    finally:
        del graphs._capture


def check_a_capture_without_memory() -> None:
    """Its steps are launched, with the same results; other rooms are captured behind it."""
    with tempfile.TemporaryDirectory() as folder, small_rooms():
        write_llama(Path(folder), num_hidden_layers=2, max_position_embeddings=LONGEST)
        engine, rng = tiny(folder, "TRITON_ATTN"), random.Random(3)
        graphs = graphs_of(engine)
        for size, short in ((SIZES[-1], True), (SIZES[0], False), (SIZES[-1], False)):
            items = [Item(engine.allocate(size), [rng.randrange(3, 90)] * size, 0, 1, taps=(0, 1))]
            with launched(engine):
                expected = engine.step(items)
            known = len(graphs._captured)
            with no_memory(graphs) if short else nullcontext():
                assert same(engine.step(items), expected), size
            assert len(graphs._captured) - known == (size == SIZES[0]), size
            items[0].table.free()


def check_a_block_without_memory_for_its_graph() -> None:
    """It is launched now and from now on; blocks of other shapes are captured behind it."""
    with tempfile.TemporaryDirectory() as folder, small_rooms():
        write_llama(Path(folder), num_hidden_layers=2, max_position_embeddings=LONGEST)
        engine, rng = tiny(folder, "TRITON_ATTN"), random.Random(4)
        graphs = graphs_of(engine)
        for width, short, captured in ((3, True, 0), (3, False, 0), (2, False, 1), (2, True, 0)):
            ids = [rng.randrange(3, 90) for _ in range(width)]
            items = [Item(engine.allocate(width), ids, 0, width, taps=(0, 1))]
            with launched(engine):
                expected = engine.step(items)
            known = len(graphs._captured)
            with no_memory(graphs) if short else nullcontext():
                assert same(engine.step(items), expected), width
            assert len(graphs._captured) - known == captured, (width, short)
            items[0].table.free()


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

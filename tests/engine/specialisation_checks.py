"""What kernels are compiled for, without a compiler: the launches of Triton's kernels are noted
down and not run, in an engine that is warmed up and then meets steps at random."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

from engine import selftest
from engine.api import Item, Sampling, WarmUp
from engine.attention import triton_paged
from engine.attention.few_rows import FEW
from engine.attention.triton_attn import TritonAttention
from engine.config import EngineConfig
from engine.kernels.triton import tiles, wide
from engine.loading import load_engine
from engine.runner import NativeEngine
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.tiny import write_llama

Key = tuple[Any, ...]
TAPS = (0, 1)
SESSIONS, WIDEST, LONGEST = 8, 8, 8192
STEPS = 400


def specialised(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Key:
    """What Triton compiles a kernel anew for: types, constants, ones, multiples of 16."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    hints, free = kernel.fn.__annotations__, unspecialised(kernel)
    found: list[Any] = [kernel.fn.__name__]
    for name, value in sorted(given.items()):
        if name not in kernel.arg_names or "constexpr" in str(hints.get(name, "")):
            found.append((name, str(value)))
        elif isinstance(value, torch.Tensor):
            found.append((name, str(value.dtype), value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((name, name not in free and (value == 1, value % 16 == 0)))
        else:
            found.append((name, type(value).__name__))
    return tuple(found)


def unspecialised(kernel: Any) -> tuple[str, ...]:
    return tuple(kernel.kwargs.get("do_not_specialize") or ())


@contextmanager
def noted() -> Iterator[dict[Key, None]]:
    """Launches in between are not run; as an H200 would choose them."""
    launched: dict[Key, None] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        launched[specialised(self, args, options)] = None

    plain, init = InterpretedFunction.run, TritonAttention.__init__
    kept = wide.equal_tiles, triton_paged._INTERPRETED_PROCESSORS, selftest.rows_independent

    def built(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self._few_rows, self._ieee = FEW, False

    InterpretedFunction.run = run
    TritonAttention.__init__ = built  # type: ignore[method-assign]
    wide.equal_tiles = lambda dtype: tiles.WIDE
    triton_paged._INTERPRETED_PROCESSORS = 132
    selftest.rows_independent = lambda engine: True
    try:
        yield launched
    finally:
        InterpretedFunction.run, TritonAttention.__init__ = plain, init  # type: ignore[method-assign]
        wide.equal_tiles, triton_paged._INTERPRETED_PROCESSORS, selftest.rows_independent = kept


def engine_of(folder: Path) -> tuple[NativeEngine, FakeGraphs]:
    write_llama(
        folder, hidden_size=576, intermediate_size=1536, vocab_size=4096, num_hidden_layers=2,
        num_attention_heads=9, num_key_value_heads=3, head_dim=64, max_position_embeddings=LONGEST,
    )  # fmt: skip
    config = EngineConfig(
        model=str(folder), dtype="bfloat16", kernels="triton", attention_backend="TRITON_ATTN",
        kv_pages=SESSIONS * LONGEST // 16 + SESSIONS,
    )  # fmt: skip
    engine = load_engine(config)
    assert engine._stepper is not None
    engine._stepper._graphs = graphs = FakeGraphs()
    return engine, graphs


def some_step(rng: random.Random, engine: NativeEngine) -> list[Item]:
    """Up to two prompts' chunks beside the blocks of other sessions, or either alone."""
    # Where logits are changed, if by nothing, steps with prompts are launched.
    bias = rng.choice([(), (), ((3, 0.0),)])
    sampling = rng.choice(
        [Sampling(0.0, logit_bias=bias), Sampling(1.0, top_p=0.9, logit_bias=bias)]
    )
    room, asked = engine.info.prefill_chunk, []
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        rows = min(room, rng.choice([rng.randint(1, 16), rng.randint(1, 256)]))
        room -= rows
        start = rng.choice([0, 16 * rng.randint(0, 30), 256 * rng.randint(0, 29)])
        asked += [(start, rows, rng.choice([0, 1]))] if rows else []
    for _ in range(rng.randint(0, SESSIONS - len(asked))):
        rows = rng.randint(1, WIDEST)
        asked.append((rng.randint(0, LONGEST - WIDEST), rows, rows))
    taps, exact = rng.choice([(), TAPS]), rng.random() < 0.5
    items = []
    for start, rows, draws in asked:
        table = engine.allocate(start + rows)
        table.length = start
        items.append(Item(table, [1] * rows, start, draws, sampling, taps=taps, exact=exact))
    return items


def check_no_step_compiles_a_kernel_after_warming() -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder, noted() as launched:
        engine, graphs = engine_of(Path(folder))
        launched.clear()
        shapes = engine.warm_up(WarmUp(SESSIONS, WIDEST, TAPS))
        before = dict(launched)
        print(f"{shapes} shapes, {len(graphs.keys)} graphs, {len(before)} kernels")
        for _ in range(STEPS):
            items = some_step(rng, engine)
            if items:
                engine.step(items)
            for item in items:
                item.table.free()
            new = [key for key in launched if key not in before]
            told = [(len(i.ids), i.start, i.draws) for i in items]
            assert not new, (told, new)

"""Run as a program: the engine on Triton's kernels and TRITON_ATTN against torch's operators."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

if "--cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

from engine.api import Item, Sampling
from engine.models.loose_kernels import LooseKernels
from engine.runner import NativeEngine
from tests.engine.interpreter import prepare
from tests.engine.tiny import load_tiny, write_model

DEVICE = "cuda" if "--cuda" in sys.argv else "cpu"
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, seed=2**63 + 5, top_k=20, top_p=0.9)


def tokens(
    engine: NativeEngine,
    sampling: Sampling,
    drafts: list[int],
    count: int = 3,
    exact: bool = True,
) -> list[int]:
    """After a prompt of 11 tokens, beside another session, with drafts that are mostly wrong."""
    prompts = [list(range(3, 14)), list(range(20, 27))]
    tables = [engine.allocate(0) for _ in prompts]
    texts = [list(prompt) for prompt in prompts]
    starts = [
        Item(table, ids, 0, 1, sampling, exact=exact, context=ids, prompt_len=len(ids))
        for table, ids in zip(tables, prompts, strict=True)
    ]
    for text, result in zip(texts, engine.step(starts), strict=True):
        text += result.tokens
    while len(texts[0]) < 11 + count:
        items = [
            Item(
                table, [text[-1], *drafts], len(text) - 1, 1 + len(drafts), sampling,
                taps=(0, 2), exact=exact, context=text, prompt_len=len(prompt),
            )
            for table, text, prompt in zip(tables, texts, prompts, strict=True)
        ]  # fmt: skip
        for text, result in zip(texts, engine.step(items), strict=True):
            text += result.tokens
            assert result.rows is not None and result.rows.is_cpu
            assert len(result.rows) == result.accepted + 1
    engine.check_integrity()
    for table in tables:
        table.free()
    return texts[0][11 : 11 + count]


def chosen_on_the_host(engine: NativeEngine) -> None:
    """A block of which numbers are asked for has the tokens of one that is drawn at once."""
    table, ids = engine.allocate(0), [3, 4, 5]
    plain, told = (
        engine.step([Item(table, ids, 0, 3, GREEDY, margins=wanted)])[0] for wanted in (False, True)
    )
    assert told.tokens == plain.tokens and len(told.margins) == len(told.tokens)
    table.free()


def main() -> None:
    if DEVICE == "cpu":
        prepare()
    with tempfile.TemporaryDirectory() as scratch:
        write_model(Path(scratch), "qwen3", head_dim=16, num_hidden_layers=3)
        options = {"device": DEVICE, "kv_pages": 16, "max_length": 64}
        plain = load_tiny(Path(scratch), "torch", attention_backend="TORCH_SDPA", **options)
        fused = load_tiny(Path(scratch), "triton", attention_backend="TRITON_ATTN", **options)
        assert (fused.attention.chosen, fused.rows_independent) == ("TRITON_ATTN", True)
        # The interpreter takes its time, and draws are all that differs.
        for sampling in (GREEDY, SAMPLED) if DEVICE == "cuda" else (SAMPLED,):
            expected = tokens(plain, sampling, [])
            assert tokens(fused, sampling, []) == expected
            assert tokens(fused, sampling, [7, 8]) == expected
        chosen_on_the_host(fused)
        # Products by torch, as steps of many rows have them that need not be exact.
        model = fused._model
        model.kernels = replace(model.kernels, loose_rows=1)
        loose = model.kernels.loose(1)
        assert isinstance(loose, LooseKernels) and model.kernels.loose(2) is loose
        assert tokens(fused, SAMPLED, [7, 8], 2, exact=False) == expected[:2]
    print("equal")


if __name__ == "__main__":
    main()

"""A drafter in a target on Triton's kernels against the pair on torch's operators; `interpreted`
runs the checks. `pair`, `rounds` and `Round` serve the GPU's script too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draft_svc.colocated import BlockDrafter
from engine.api import Ask, Item, Sampling, never
from engine.colocated import DrafterSettings
from engine.config import EngineConfig
from engine.loading import load_engine
from engine.runner import NativeEngine
from tests.engine.test_dialects import CASES
from tests.engine.tiny import write_llama

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.9, seed=2**63 + 5, top_k=20, top_p=0.9)
K = 4


class Cold(BlockDrafter):
    """Measures nothing at start, which takes the interpreter minutes."""

    def warm_up(self, stopped: Callable[[], bool] = never) -> None:
        pass


@dataclass(frozen=True)
class Round:
    """What one session got: tokens of the verdict and the proposal behind it."""

    tokens: tuple[int, ...]
    proposed: tuple[int, ...]


def pair(
    target: Path, draft: Path, method: str, engine: EngineConfig, **settings: Any
) -> tuple[NativeEngine, BlockDrafter]:
    told = {"kernels": engine.kernels, "dtype": engine.dtype, "head_dtype": "model"} | settings
    drafter = Cold(method, DrafterSettings(checkpoint=str(draft), model=str(target), **told))
    return load_engine(replace(engine, model=str(target)), drafter), drafter


def tiny_pair(folder: str, engine: EngineConfig) -> tuple[NativeEngine, BlockDrafter]:
    """A random Llama and its DFlash draft, both with TRITON_ATTN; the files lie in the folder."""
    target, draft = Path(folder, "target"), Path(folder, "draft")
    write_llama(target)
    CASES["zlab"].write(draft, target)
    return pair(target, draft, "dflash", engine, attention_backend="TRITON_ATTN")


def rounds(
    engine: NativeEngine,
    drafter: BlockDrafter | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    count: int,
    own: bool = False,
    k: int = K,
) -> list[list[Round]]:
    """That many rounds of all sessions together; without a drafter single tokens. With `own` the
    last session is not drafted for, and exports rows."""
    texts, tables = [list(p) for p in prompts], [engine.allocate(0) for _ in prompts]
    drafts: list[tuple[int, ...]] = [() for _ in prompts]
    found: list[list[Round]] = [[] for _ in prompts]
    last = len(prompts) - 1 if own else -1
    for step in range(count + 1):
        items = [
            Item(
                table, [text[-1], *ids] if step else text, len(text) - 1 if step else 0,
                1 + len(ids), sampling, taps=(0,) if index == last else (), context=text,
                prompt_len=len(prompts[index]), drafted=drafter is not None and index != last,
            )
            for index, (table, text, ids) in enumerate(zip(tables, texts, drafts, strict=True))
        ]  # fmt: skip
        for text, result in zip(texts, engine.step(items), strict=True):
            text += result.tokens
        if drafter is not None:
            asked = [index for index in range(len(prompts)) if index != last]
            asks = [Ask(tables[i], texts[i][-1], k, sampling) for i in asked]
            for i, proposed in zip(asked, drafter.propose(asks), strict=True):
                assert not proposed.reason, proposed
                drafts[i] = proposed.ids
        for index, text in enumerate(texts):
            known = len(prompts[index]) + sum(len(one.tokens) for one in found[index])
            found[index].append(Round(tuple(text[known:]), drafts[index]))
    for table in tables:
        table.free()
    engine.check_integrity()
    return found


def text_of(one: Sequence[Round]) -> list[int]:
    return [token for each in one for token in each.tokens]


def checked(name: str, sampling: Sampling, own: bool = False, count: int = 2) -> None:
    """`count` verdicts after the prompt's, with a proposal behind each."""
    method = "dspark" if CASES[name].markov else "dflash"
    prompts = [list(range(3, 14)), list(range(20, 25))]
    config = EngineConfig(dtype="float32", kv_pages=16, max_length=64)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        write_llama(target)
        CASES[name].write(draft, target)
        plain, by_hand = pair(target, draft, method, replace(config, kernels="torch"))
        triton = replace(config, kernels="triton", attention_backend="TRITON_ATTN")
        fused, drafter = pair(target, draft, method, triton, attention_backend="TRITON_ATTN")
        assert drafter._stepper is not None and by_hand._stepper is None
        if not own:  # nobody wants rows outside, so none leave the device
            assert fused._stepper is not None
            fused._stepper._export.take = None  # type: ignore[assignment, method-assign]
        expected = rounds(plain, by_hand, prompts, sampling, count, own)
        assert rounds(fused, drafter, prompts, sampling, count, own) == expected
        alone = rounds(plain, None, prompts, sampling, 8)
        for one, text in zip(expected, alone, strict=True):
            assert text_of(one) == text_of(text)[: len(text_of(one))]


def check_dflash_drafts_for_its_target() -> None:
    checked("zlab", SAMPLED, count=1)


def check_more_rounds() -> None:
    checked("zlab", SAMPLED)


def check_dspark_drafts_for_its_target() -> None:
    checked("deepspec", GREEDY)


def check_sessions_that_are_not_drafted_for() -> None:
    checked("zlab_causal", SAMPLED, own=True)

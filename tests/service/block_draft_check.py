"""Block drafts on Triton's kernels against torch's operators; `interpreted` runs the checks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_svc.methods.base import Request, RowBlock
from draft_svc.methods.dflash import DFlashMethod
from draft_svc.methods.dflash_context import DFlashContext
from engine import block_step
from engine.api import Sampling
from engine.block_step import BlockStepper
from specwire.errors import Reason, SpecwireError
from tests.engine.test_dialects import CASES
from tests.engine.tiny import write_llama
from tests.service.test_draft_dialects import load

# Of several sessions at once: committed tokens, tokens wanted, how to draw.
SESSIONS = (
    (3, 3, Sampling(temperature=0.0)),
    (15, 2, Sampling(temperature=0.9, seed=2**63 + 5, choice=1, top_k=20, top_p=0.9)),
    (10, 1, Sampling(temperature=0.7, seed=11, min_p=0.05)),
)
TRITON: dict[str, Any] = {"kernels": "triton", "attention_backend": "TRITON_ATTN"}


@contextmanager
def drafts(name: str, *settings: dict[str, Any]) -> Iterator[list[DFlashMethod]]:
    """The draft of a case, loaded once for each of the settings."""
    with tempfile.TemporaryDirectory() as folder:
        target, draft = Path(folder, "target"), Path(folder, "draft")
        write_llama(target)
        CASES[name].write(draft, target)
        method = "dspark" if CASES[name].markov else "dflash"
        found = [load(draft, target, method, **own) for own in settings]
        yield [own for own in found if isinstance(own, DFlashMethod)]


def rows_of(method: DFlashMethod, count: int) -> Tensor:
    assert method.info.rows is not None
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, method.info.rows.width, generator=generator).bfloat16()


def block(start: int, rows: Tensor) -> RowBlock:
    return RowBlock(start, rows.cpu().view(torch.uint16).numpy())


def opened(method: DFlashMethod, length: int, sampling: Sampling) -> DFlashContext:
    """A session whose anchor is its own length; rows come in three pieces."""
    context, rows = method.open([3] * length, sampling), rows_of(method, length)
    method.update(context, length, [length], [])
    for first, end in pairwise((0, 1, length // 2, length)):
        if first < end:
            method.update(context, length + 1, (), [block(first, rows[first:end])])
            method._catch_up()
    return context


def written(method: DFlashMethod, context: DFlashContext) -> Tensor:
    """Context keys and values of every layer."""
    cache, pages = method._model.cache, torch.tensor(context.table.pages, dtype=torch.int64)
    layers = range(cache.geometry.layers)
    kept = [torch.cat(cache.gather(layer, pages), -1)[: context.table.length] for layer in layers]
    return torch.stack(kept)


def same(name: str, plain: DFlashMethod, fused: DFlashMethod, count: int = 2) -> None:
    """Tokens, chances and context of the first sessions together; of three also of one alone."""
    sessions = SESSIONS[:count]
    assert plain._stepper is None and fused._stepper is not None
    ours, theirs = ([opened(m, n, s) for n, _, s in sessions] for m in (fused, plain))
    for own, other in zip(ours, theirs, strict=True):
        difference = written(fused, own) - written(plain, other)
        assert difference.abs().max() < 1e-4, (name, difference.abs().max())
    for chosen in (slice(count), slice(1, 2))[: count - 1]:
        asked = [k for _, k, _ in sessions][chosen]
        before = [written(fused, own) for own in ours]
        found, expected = (
            method.propose([Request(c, k) for c, k in zip(own[chosen], asked, strict=True)])
            for method, own in ((fused, ours), (plain, theirs))
        )
        for one, other, k in zip(found, expected, asked, strict=True):
            assert one.ids == other.ids and len(one.ids) == k, (name, one, other)
            assert len(one.confidences) == len(other.confidences)
            gaps = [abs(a - b) for a, b in zip(one.confidences, other.confidences, strict=True)]
            assert not gaps or max(gaps) < 1e-4, (name, gaps)
        after = [written(fused, own) for own in ours]
        assert all(map(torch.equal, before, after)), "a block wrote into a context"
    for method, contexts in ((fused, ours), (plain, theirs)):
        for context in contexts:
            method.close(context)
        method.check_integrity()


def checked(name: str, count: int = 2, **settings: Any) -> None:
    with drafts(name, {"kernels": "torch"} | settings, TRITON | settings) as (plain, fused):
        same(name, plain, fused, count)


def check_sessions_beside_padding() -> None:
    checked("zlab")
    checked("deepspec", 3)


def check_scaled_and_interleaved_rotation() -> None:
    checked("zlab_newer")
    checked("zlab_interleaved")


def check_a_mask_vector() -> None:
    checked("zlab_mask_vector")


def check_a_trimmed_head() -> None:
    checked("speculators")


def check_a_trimmed_head_behind_a_walk() -> None:
    checked("speculators_dspark")


def check_markov_heads() -> None:
    checked("deepspec_gated")
    checked("speculators_rnn")


def check_more_sessions_than_a_graph_holds() -> None:
    batches = block_step._BATCHES
    block_step._BATCHES = (1,)
    try:
        checked("zlab_causal", confidences=False)
    finally:
        block_step._BATCHES = batches


def check_a_backend_without_a_fixed_form() -> None:
    settings = {"kernels": "triton", "attention_backend": "TORCH_SDPA"}
    with drafts("zlab", {"kernels": "torch"}, settings) as (plain, fused):
        assert fused._stepper is not None and not fused._stepper.fixed
        same("zlab", plain, fused)


def check_padding_writes_to_the_scratch_page_alone() -> None:
    with drafts("zlab", TRITON) as (method,):
        contexts = [opened(method, n, s) for n, _, s in SESSIONS]
        cache, pool = method._model.cache, method._model.pool
        assert cache.page_count == pool.page_count + 1
        free = set(range(pool.page_count))
        free -= {page for context in contexts for page in context.table.pages}
        data = cache.data
        data[:, :, sorted(free)] = 7.0
        method.propose([Request(context, 2) for context in contexts])
        free -= {page for context in contexts for page in context.table.pages}
        assert len(free) > 20 and bool((data[:, :, sorted(free)] == 7.0).all())
        assert bool((data[:, :, -1] != 0).any()), "three blocks run as four"


def check_what_cannot_be_is_refused() -> None:
    for settings, reason in (
        ({"head_dtype": "int8"}, Reason.SETTINGS_INVALID),
        ({"device": "cuda"}, Reason.BACKEND_UNAVAILABLE),
        ({"attention_backend": "FLASHINFER"}, Reason.BACKEND_UNAVAILABLE),
    ):
        try:
            with drafts("zlab", TRITON | settings):
                raise AssertionError(settings)
        except SpecwireError as error:
            assert error.reason == reason, error
            named = next(iter(settings)).split("_")[0]
            assert named in str(error).lower() and next(iter(settings.values())) in str(error), (
                error
            )


def check_the_handshake() -> None:
    with drafts("zlab", TRITON) as (method,):
        info = method.info
        assert info.device == "cpu" and info.attention is not None
        assert (info.attention.chosen, info.attention.graph_mode) == ("TRITON_ATTN", "NONE")
        assert isinstance(method._stepper, BlockStepper) and method._stepper.fixed

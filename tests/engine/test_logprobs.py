"""Log probabilities of prompt and output against transformers' log softmax on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine import logprobs
from engine.api import Item, Sampling, TokenLogprobs
from engine.runner import NativeEngine
from tests.engine.tiny import HIDDEN, KERNELS, load_tiny, random_ids, reference, write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    path = tmp_path_factory.mktemp("logprobs")
    return path, write_llama(path)


@pytest.fixture(scope="module", params=KERNELS)
def engine(request: pytest.FixtureRequest, model: tuple[Path, LlamaForCausalLM]) -> NativeEngine:
    return load_tiny(model[0], request.param)


def law_of(model: LlamaForCausalLM, ids: list[int]) -> Tensor:
    return reference(model, ids).double().log_softmax(-1)


def check(got: TokenLogprobs, law: Tensor, token: int, top: int) -> None:
    assert got.token == token
    assert got.logprob == pytest.approx(float(law[token]), abs=2e-4)
    assert got.rank == 1 + int((law > law[token] + 1e-9).sum())
    values, ids = law.topk(top)
    assert [i for i, _ in got.top] == ids.tolist()
    assert [v for _, v in got.top] == pytest.approx(values.tolist(), abs=2e-4)


def test_prompt_logprobs_across_chunks(
    engine: NativeEngine, model: tuple[Path, LlamaForCausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ROWS", 7)
    prompt = random_ids(50, seed=4)
    law = law_of(model[1], prompt)
    table = engine.allocate(64)
    scored: list[TokenLogprobs] = []
    rows: list[Tensor] = []
    plain = Sampling(temperature=0.0)
    for start, end in ((0, 20), (20, 21), (21, 50)):
        item = Item(
            table,
            prompt[start:end],
            start,
            1 if end == 50 else 0,
            plain,
            taps=(1,),
            context=prompt,
            prompt_len=50,
            prompt_logprobs=5,
        )
        mate = Item(engine.allocate(16), random_ids(3), 0, 1, plain)
        result, other = engine.step([item, mate])
        mate.table.free()
        assert other.prompt_logprobs == () and other.rows is None
        assert result.rows is not None and result.rows.dtype == torch.bfloat16
        assert result.rows.shape == (end - start, HIDDEN)
        rows.append(result.rows)
        scored += result.prompt_logprobs
    table.free()
    assert len(scored) == 49
    for i, got in enumerate(scored):
        check(got, law[i], prompt[i + 1], 5)
    # Rows for the draft are what they are without scores.
    table = engine.allocate(64)
    whole = engine.step([Item(table, prompt, 0, 1, plain, taps=(1,))])[0].rows
    table.free()
    assert whole is not None
    assert torch.allclose(torch.cat(rows).float(), whole.float(), atol=0.05)


def test_output_logprobs_are_those_of_the_accepted_rows(
    engine: NativeEngine, model: tuple[Path, LlamaForCausalLM]
) -> None:
    """The same values token by token and in blocks, the options of the request left out."""
    prompt = random_ids(30, seed=5)
    sampling = Sampling(temperature=0.9, seed=3, presence_penalty=1.0, top_k=20)

    def generate(skill: int) -> tuple[list[int], list[TokenLogprobs]]:
        table, ids, scored = engine.allocate(96), list(prompt), []
        start = 0
        while len(ids) < 50:
            drafts = [] if skill == 0 or start == 0 else [*oracle[len(ids) :][:skill], 0]
            own = ids[start:] + drafts
            item = Item(
                table,
                own,
                start,
                1 + len(drafts),
                sampling,
                context=ids,
                prompt_len=30,
                logprobs=4,
            )
            result = engine.step([item])[0]
            assert len(result.logprobs) == len(result.tokens)
            ids += result.tokens
            scored += result.logprobs
            start = len(ids) - 1
        table.free()
        return ids[:50], scored[:20]

    oracle, plain = generate(0)
    ids, scored = generate(3)
    assert ids == oracle and scored == plain
    law = law_of(model[1], ids)
    for i, got in enumerate(scored):
        check(got, law[29 + i], ids[30 + i], 4)

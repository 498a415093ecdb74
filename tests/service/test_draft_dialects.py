"""Drafts of every published layout behind the service: rows of a real target go in, and what comes
out is drawn from an independent forward with the target's noise."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draft_svc.host import DraftHost
from draft_svc.loading import load_methods
from draft_svc.methods.base import AnyMethod, Request, RowBlock
from draft_svc.methods.dflash import blocks_of
from draft_svc.settings import DraftSettings
from engine.api import Item, Sampling
from engine.linear import Linear
from engine.noise import gumbel
from engine.sampling import accept
from specwire.rpc import channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.engine.draft_reference import (
    Meaning,
    State,
    block_logits,
    walk,
    write,
)
from tests.engine.test_dialects import CASES
from tests.engine.tiny import HIDDEN, VOCAB, load_tiny, write_llama
from tests.service.draft_peer import LIMITS, TARGET, Link, advance_item, open_item, session_key

SEED = 2**63 + 7
PROMPT = [5, 17, 60, 33, 8, 91, 44, 12, 70, 29, 6]
ROUNDS = 5
# Near a tie the draft's fp32 may choose the other one.
CLOSE = 0.02


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("target")
    return directory, write_llama(directory)


def load(directory: Path, target: Path, method: str, **settings: Any) -> AnyMethod:
    options: dict[str, Any] = {"dtype": "float32", "kv_pages": 64, "page_tokens": 4}
    options |= {"methods": (method,), "target": str(target), "confidences": True} | settings
    for key in ("draft", "dspark"):
        options.setdefault(key, str(directory))
    return load_methods(DraftSettings(**options), lambda _: None)[method]


@asynccontextmanager
async def serving(folder: Path, methods: dict[str, AnyMethod]) -> AsyncIterator[Any]:
    host = DraftHost(
        lambda: methods,
        address=f"unix:{folder}/draft.sock",
        limits=dataclasses.replace(LIMITS, rows_buffer_bytes=1 << 20),
        default_method=next(iter(methods)),
    )
    async with (
        host,
        grpc.aio.insecure_channel(host.address, options=channel_options(link=True)) as channel,
    ):
        yield draft_pb2_grpc.DraftServiceStub(channel)


async def push(stub: Any, key: Any, step: int, start: int, rows: Tensor) -> None:
    call, data = stub.PushFeatures(), rows.contiguous().view(torch.uint16).numpy().tobytes()
    chunk = draft_pb2.FeatureChunk(key=key, step_id=step, start=start, count=len(rows), rows=data)
    await call.write(draft_pb2.PushFeaturesRequest(target_incarnation=TARGET, chunks=[chunk]))
    ack = (await call.read()).acks[0]
    assert not ack.HasField("error"), ack.error


@torch.inference_mode()
def entering(model: PreTrainedModel, ids: Sequence[int]) -> list[Tensor]:
    """The stream before each layer, as transformers has it, in the dtype of the wire. Behind the
    last layer it is normed there, so no draft here reads it."""
    states = model(torch.tensor([list(ids)]), output_hidden_states=True).hidden_states
    return [state[0].bfloat16().float() for state in states]


def expected(
    state: State,
    m: Meaning,
    rows: list[Tensor],
    anchor: int,
    temperature: float,
    proposed: Sequence[int],
) -> list[int]:
    """Tokens drawn at temperature with the target's noise of each position, ids of the target."""
    start = len(rows[0])

    def choose(slot: int, logits: Tensor) -> int:
        scores = logits / (temperature or 1.0)
        if temperature:
            scores = scores + gumbel(SEED, 2, start + 1 + slot, VOCAB)
        best = int(scores.argmax())
        near = slot < len(proposed) and float(scores[best] - scores[proposed[slot]]) < CLOSE
        return proposed[slot] if near else best

    if m.markov:
        return walk(state, m, rows, anchor, choose).tokens
    return [choose(slot, x) for slot, x in enumerate(block_logits(state, m, rows, anchor))]


SERVED = [
    "zlab", "zlab_interleaved", "zlab_mask_vector", "deepspec_gated", "deepspec_rnn",
    "deepspec_dflash", "speculators", "speculators_whole", "speculators_dspark", "speculators_rnn",
]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", SERVED)
async def test_rounds_with_a_real_target(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], name: str, temperature: float
) -> None:
    """DF-5, DF-17, DF-44: the service asks for the layers that the checkpoint means, and draws over
    the target's ids with the noise of the index drawn, however few rows the head has."""
    directory, model = target
    case = CASES[name]
    state, meaning = case.write(tmp_path / "draft", directory)
    method = "dspark" if case.markov else "dflash"
    engine = load_tiny(directory)
    sampling = Sampling(temperature=temperature, seed=SEED, choice=2)
    wire = common_pb2.Sampling(temperature=temperature, seed=SEED, choice=2)
    async with serving(tmp_path, {method: load(tmp_path / "draft", directory, method)}) as stub:
        info = (await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())).drafters[0]
        taps = tuple(info.row_format.tap_ids)
        assert taps == tuple(i - 1 for i in case.entered)
        assert info.row_format.width == HIDDEN * len(taps)
        assert info.max_draft_tokens == 5 - case.first
        assert bool(info.d2t_hash) is (case.ids is not None)
        assert info.rope_style == ("interleaved" if meaning.interleaved else "neox")
        assert info.rope_theta == pytest.approx(meaning.theta)
        link, key, table = Link(stub), session_key(), engine.allocate(96)
        fingerprint = info.target_fingerprint
        assert fingerprint == engine.info.fingerprint
        await link.ask(
            open_item(key, PROMPT, method, sampling=wire, target_fingerprint=fingerprint)
        )
        ids, sent = list(PROMPT), 0
        item = Item(table, PROMPT, 0, 1, sampling, taps)
        for step in range(ROUNDS):
            (result,) = engine.step([item])
            assert result.rows is not None
            await push(stub, key, step, sent, result.rows)
            sent += len(result.rows)
            k = info.max_draft_tokens
            advance = advance_item(key, step, len(ids), result.tokens, k, rows_count=1)
            reply = await link.ask(advance)
            ids += result.tokens
            found = list(reply.proposal.ids)
            rows = entering(model, ids[:-1])
            assert found == expected(state, meaning, rows, ids[-1], temperature, found)
            item = Item(table, [ids[-1], *found], len(ids) - 1, 1 + k, sampling, taps)


# -- methods by what they can do, not by their names -----------------------------------------------

METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "dspark": ("dspark", {}),
    "hybrid over dflash": ("hybrid", {"hybrid_neural": "dflash"}),
    "hybrid over dspark": ("hybrid", {"hybrid_neural": "dspark"}),
}


def drafts(folder: Path, target: Path) -> dict[str, str]:
    CASES["zlab"].write(folder / "a", target)
    CASES["speculators_dspark"].write(folder / "b", target)
    return {"draft": str(folder / "a"), "dspark": str(folder / "b")}


def wire_rows(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2 * HIDDEN, generator=generator).bfloat16()


def block(start: int, rows: Tensor) -> RowBlock:
    return RowBlock(start, rows.view(torch.uint16).numpy())


@pytest.mark.parametrize("name", METHODS)
def test_every_block_drafter_keeps_its_context(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], name: str
) -> None:
    """DF-19: rounds without a proposal, a rollback and a second turn from the cache are as good as
    a cold start for each of them."""
    method, settings = METHODS[name]
    paths = drafts(tmp_path, target[0])
    one, cold = (load(tmp_path, target[0], method, **paths, **settings) for _ in range(2))
    assert (
        one.info.rows is not None
        and one.info.target_fingerprint
        and one.info.d2t_hash == (cold.info.d2t_hash)
    )
    rows, greedy = wire_rows(48), Sampling(temperature=0.0)
    text = list(range(10, 41))
    first = one.open(text, greedy)
    one.restore(first, "target")
    one.update(first, 31, [80], [block(0, rows[:31])])
    one.propose([Request(first, 4)])
    one.update(first, 29, [81, 82], [block(28, rows[28:30])])  # two are taken back
    one.update(first, 31, [83], [block(30, rows[30:31])])  # and nothing is asked for
    while one.work():
        pass
    one.close(first)
    again = [*text[:29], *range(50, 60)]
    second = one.open(again, greedy)
    origin, have = one.restore(second, "target")
    assert (origin, have) == (0, 28), "whole pages of the first turn"
    one.update(second, 39, [84], [block(have, rows[have:39])])
    alone = cold.open(again, greedy)
    cold.update(alone, 39, [84], [block(0, rows[:39])])
    (warm,), (fresh,) = one.propose([Request(second, 4)]), cold.propose([Request(alone, 4)])
    assert warm.ids == fresh.ids and len(warm.ids) == 4
    for each, context in ((one, second), (cold, alone)):
        each.close(context)
        each.check_integrity()


def test_the_targets_head_is_packed_once(
    tmp_path: Path, target: tuple[Path, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is hosted together: dflash, dspark and a hybrid; a head of a draft's own is its
    own."""
    made: list[tuple[int, int]] = []

    def counted(original: Callable[..., None]) -> Callable[..., None]:
        def build(self: Linear, weight: Tensor, *more: Any) -> None:
            made.append((weight.shape[0], weight.shape[1]))
            original(self, weight, *more)

        return build

    for kind in Linear.__subclasses__():
        if kind.__name__ != "BiasedLinear":
            monkeypatch.setattr(kind, "__init__", counted(kind.__init__))
    write(tmp_path / "plain", *_plain("zlab", target[0], tmp_path))
    write(tmp_path / "spark", *_plain("deepspec_gated", target[0], tmp_path))
    settings = DraftSettings(
        methods=("hybrid", "dspark", "dflash"), target=str(target[0]), kv_pages=8, dtype="float32",
        draft=str(tmp_path / "plain"), dspark=str(tmp_path / "spark"),
    )  # fmt: skip
    methods = load_methods(settings, lambda _: None)
    assert made.count((VOCAB, HIDDEN)) == 1
    assert methods["dspark"]._model._head is methods["dflash"]._model._head
    assert methods["dspark"]._model._embedding is methods["dflash"]._model._embedding
    own = load(tmp_path, target[0], "dspark", dspark=_own(target[0], tmp_path))
    assert own._model._head.out_features == VOCAB and made.count((VOCAB, HIDDEN)) == 2


def _plain(name: str, target: Path, folder: Path) -> tuple[dict[str, Any], State]:
    case = CASES[name]
    state, _ = case.write(folder / "written", target)
    return case.config, state


def _own(target: Path, folder: Path) -> str:
    CASES["deepspec"].write(folder / "own", target)
    return str(folder / "own")


# -- sampling ------------------------------------------------------------------------------------


def test_the_targets_noise_is_worth_more_than_draws_of_its_own(
    tmp_path: Path, target: tuple[Path, PreTrainedModel]
) -> None:
    """DF-16: at T = 1 a draft that draws with noise of its own is rejected more than one that takes
    its best token; one that draws with the target's noise is accepted most."""
    torch.manual_seed(5)
    write(tmp_path / "draft", *_plain("zlab", target[0], tmp_path))
    method = load(tmp_path / "draft", target[0], "dflash", kv_pages=256)

    def asked(temperature: float, seed: int) -> list[Request[Any]]:
        requests = []
        for choice in range(60):
            sampling = Sampling(temperature=temperature, seed=seed, choice=choice)
            context = method.open([3] * 6, sampling)
            method.update(context, 6, [40 + choice % 9], [block(0, wire_rows(6, seed=choice))])
            requests.append(Request(context, 4))
        return requests

    accepted, drawn = [], None
    for temperature, seed in ((1.0, 7), (0.0, 7), (1.0, 8)):
        requests = asked(temperature, seed)
        drafts = method.propose(requests)
        if drawn is None:  # a target that is close to the draft, and draws with seed 7
            logits = method._model.propose_logits(blocks_of(requests))
            logits = logits + 0.5 * torch.randn(logits.shape)
            drawn = [
                [int((x + gumbel(7, c, 7 + slot, VOCAB)).argmax()) for slot, x in enumerate(rows)]
                for c, rows in enumerate(logits)
            ]
        accepted.append(sum(accept(d.ids, t) for d, t in zip(drafts, drawn, strict=True)))
        for request in requests:
            method.close(request.context)
    coupled, best, own = accepted
    assert coupled > 1.3 * best > 1.3 * own, accepted

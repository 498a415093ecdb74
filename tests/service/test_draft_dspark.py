"""The DSpark drafter as a service: proposals against a walk written from the equations."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_svc.host import DraftHost
from draft_svc.loading import load_methods
from draft_svc.methods.base import REASON_CAPACITY, REASON_ROWS_MISSING, Request, RowBlock
from draft_svc.methods.dflash_context import DFlashContext
from draft_svc.methods.dspark import DSparkMethod
from draft_svc.settings import DraftSettings
from engine.api import Sampling
from engine.attention.base import LayerMode
from engine.noise import gumbel
from specwire.errors import Reason, SpecwireError
from specwire.rpc import channel_options
from specwire.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from tests.engine.test_dflash import BASE, BLOCK, MASK, TAPS, WIDTH, reference_states, write_draft
from tests.engine.tiny import HIDDEN, VOCAB, rewrite_config, write_llama
from tests.service.draft_peer import LIMITS, TARGET, Link, advance_item, open_item, session_key

RANK, SEED = 6, 2**63 + 11
MODES = [LayerMode(False)] * 3
SLOTS = pytest.mark.parametrize("next_token", [False, True], ids=["fill_in", "next_token"])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.8])
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


def write_dspark(directory: Path, **change: Any) -> State:
    """A random draft; None leaves a key of its config out."""
    state = write_draft(directory)
    torch.manual_seed(7)
    state |= {
        "markov_head.markov_w1.weight": torch.randn(VOCAB, RANK),
        # Strong enough that every draw depends on the token before it.
        "markov_head.markov_w2.weight": 2 * torch.randn(VOCAB, RANK),
        "confidence_head.proj.weight": torch.randn(1, HIDDEN + RANK) / HIDDEN**0.5,
        "confidence_head.proj.bias": torch.randn(1),
    }
    if change.get("enable_confidence_head") is False:
        state = {name: value for name, value in state.items() if "confidence" not in name}
    save_file(state, directory / "model.safetensors")
    flat = {
        "architectures": ["Qwen3DSparkModel"],
        "dflash_config": None,
        "mask_token_id": MASK,
        "target_layer_ids": list(TAPS),
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": False,
    }
    rewrite_config(directory, flat | change)
    return state


def load(directory: Path, target: Path, **settings: Any) -> DSparkMethod:
    options = {"dtype": "float32", "kv_pages": 64, "page_tokens": 4} | settings
    chosen = DraftSettings(
        methods=("dspark",), dspark=str(directory), target=str(target), **options
    )
    method = load_methods(chosen, lambda _: None)["dspark"]
    assert isinstance(method, DSparkMethod)
    return method


def taps(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def block(start: int, rows: Tensor) -> RowBlock:
    return RowBlock(start, rows.view(torch.uint16).numpy())


class Walk:
    """What the draft proposes after an anchor, in fp64 and one slot at a time."""

    def __init__(self, state: State, target: Path, *, next_token: bool) -> None:
        self._state, self._first = state, 0 if next_token else 1
        weights = load_file(target / "model.safetensors")
        self._embedding = weights["model.embed_tokens.weight"]
        self._head = weights["lm_head.weight"].double()

    def __call__(
        self, rows: Tensor, anchor: int, k: int, temperature: float = 0.0, choice: int = 0
    ) -> tuple[list[int], list[float], list[float]]:
        """Tokens, confidences, and the draft's own probability of each token."""
        w = {name: value.double() for name, value in self._state.items()}
        states = reference_states(self._state, MODES, self._embedding, rows.float(), anchor)
        tokens, confidences, own, previous = [], [], [], anchor
        for slot in range(k):
            h = states[self._first + slot]
            markov = w["markov_head.markov_w1.weight"][previous]
            logits = self._head @ h + w["markov_head.markov_w2.weight"] @ markov
            if "confidence_head.proj.weight" in w:
                z = w["confidence_head.proj.weight"][0] @ torch.cat((h, markov))
                z = z + w["confidence_head.proj.bias"][0]
                confidences.append(float(1 / (1 + (-z).exp())))
            scaled = logits / (temperature or 1.0)
            noise = gumbel(SEED, choice, len(rows) + 1 + slot, VOCAB) if temperature else 0.0
            previous = int((scaled + noise).argmax())
            tokens.append(previous)
            own.append(float(scaled.softmax(-1)[previous]))
        return tokens, confidences, own


def advanced(
    method: DSparkMethod, rows: Tensor, anchor: int, temperature: float = 0.0, choice: int = 0
) -> DFlashContext:
    sampling = Sampling(temperature=temperature, seed=SEED, choice=choice)
    context = method.open([3] * len(rows), sampling)
    method.update(context, len(rows), [anchor], [block(0, rows)])
    return context


@pytest.fixture
async def service(
    tmp_path: Path, target: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Any, Walk, bool]]:
    next_token = bool(request.param)
    state = write_dspark(tmp_path / "draft", sample_from_anchor=next_token)
    host = DraftHost(
        lambda: {"dspark": load(tmp_path / "draft", target)},
        address=f"unix:{tmp_path}/draft.sock",
        limits=LIMITS,
        default_method="dspark",
    )
    async with (
        host,
        grpc.aio.insecure_channel(host.address, options=channel_options(link=True)) as channel,
    ):
        walk = Walk(state, target, next_token=next_token)
        yield draft_pb2_grpc.DraftServiceStub(channel), walk, next_token


@TEMPERATURES
@pytest.mark.parametrize("service", [False, True], indirect=True, ids=["fill_in", "next_token"])
async def test_proposals_over_a_link_are_the_walk(
    service: tuple[Any, Walk, bool], temperature: float
) -> None:
    """DF-44, DF-45: the slot mode decides which slots propose; noise is that of the index drawn."""
    stub, walk, next_token = service
    info = (await stub.GetInfo(draft_pb2.DraftServiceGetInfoRequest())).drafters[0]
    most = BLOCK if next_token else BLOCK - 1
    mode = draft_pb2.SLOT_MODE_NEXT_TOKEN if next_token else draft_pb2.SLOT_MODE_FILL_IN
    assert (info.method, info.slot_mode, info.block_size) == ("dspark", mode, BLOCK)
    assert info.max_draft_tokens == most and info.mask_token_id == MASK
    assert "Markov" in info.name and f"rank {RANK}" in info.name and info.fingerprint
    assert list(info.row_format.tap_ids) == list(TAPS) and info.costs
    link, key, rows = Link(stub), session_key(), taps(60)
    sampling = common_pb2.Sampling(temperature=temperature, seed=SEED, choice=2)
    fingerprint = info.target_fingerprint
    await link.ask(
        open_item(key, [3] * 9, "dspark", sampling=sampling, target_fingerprint=fingerprint)
    )
    known, sent = 9, 0
    call = stub.PushFeatures()
    for step, count in enumerate((1, 3, 2, 5, 1)):  # tokens that each step commits
        # Rows end before the last token, the next anchor.
        new, fresh = [10 + step] * count, rows[sent : known + count - 1]
        data = fresh.view(torch.uint16).numpy().tobytes()
        chunk = draft_pb2.FeatureChunk(
            key=key, step_id=step, start=sent, count=len(fresh), rows=data
        )
        await call.write(draft_pb2.PushFeaturesRequest(target_incarnation=TARGET, chunks=[chunk]))
        assert not (ack := (await call.read()).acks[0]).HasField("error"), ack.error
        reply = await link.ask(advance_item(key, step, known, new, most))
        known, sent = known + count, sent + len(fresh)
        tokens, confidences, _ = walk(rows[:sent], new[-1], most, temperature, choice=2)
        assert list(reply.proposal.ids) == tokens
        assert list(reply.proposal.confidences) == pytest.approx(confidences, abs=1e-4)


@SLOTS
@TEMPERATURES
def test_sessions_walk_together_and_do_not_touch_each_other(
    tmp_path: Path, target: Path, next_token: bool, temperature: float
) -> None:
    state = write_dspark(tmp_path, sample_from_anchor=next_token)
    method, walk = load(tmp_path, target), Walk(state, target, next_token=next_token)
    sizes, ks = (3, 21, 40), (4, 1, 3)
    contexts = [advanced(method, taps(n, n), n, temperature, choice=n) for n in sizes]
    requests = [Request(c, k) for c, k in zip(contexts, ks, strict=True)]
    for draft, n, k in zip(method.propose(requests), sizes, ks, strict=True):
        tokens, confidences, _ = walk(taps(n, n), n, k, temperature, choice=n)
        assert list(draft.ids) == tokens
        assert list(draft.confidences) == pytest.approx(confidences, abs=1e-4)
    for context in contexts:
        method.close(context)
    method.check_integrity()
    assert method.stats().tables == 0


@SLOTS
def test_a_second_turn_is_as_good_as_a_cold_start(
    tmp_path: Path, target: Path, next_token: bool
) -> None:
    """DF-20: context shared from pages, and what a rejected block left behind, change nothing."""
    write_dspark(tmp_path, sample_from_anchor=next_token)
    method, cold = load(tmp_path, target), load(tmp_path, target)
    ids, rows = [(5 * i) % VOCAB for i in range(31)], taps(44)
    first = method.open(ids, Sampling(temperature=0.0))
    method.restore(first, "target")
    method.update(first, 31, [7], [block(0, rows[:31])])
    method.propose([Request(first, 4)])
    # Two tokens are taken back and another way is gone.
    method.update(first, 29, [8, 9], [block(28, rows[28:30])])
    method.propose([Request(first, 4)])
    method.close(first)
    text = [*ids[:29], *range(40, 50)]
    second = method.open(text, Sampling(temperature=0.0))
    origin, have = method.restore(second, "target")
    assert (origin, have) == (0, 28), "whole pages of the first turn"
    method.update(second, 39, [11], [block(have, rows[have:39])])
    alone = cold.open(text, Sampling(temperature=0.0))
    cold.update(alone, 39, [11], [block(0, rows[:39])])
    (warm,), (expected,) = method.propose([Request(second, 4)]), cold.propose([Request(alone, 4)])
    assert warm.ids == expected.ids and len(warm.ids) == 4
    assert warm.confidences == pytest.approx(expected.confidences, abs=1e-5)


def test_reasons_are_those_of_dflash(tmp_path: Path, target: Path) -> None:
    """DF-33, DF-39: a block that would leave the draft's positions is not run; a gap is named."""
    write_dspark(tmp_path)
    method = load(tmp_path, target, max_length=24)
    context = advanced(method, taps(19), 5)
    assert len(method.propose([Request(context, 4)])[0].ids) == 4
    method.update(context, 20, [6], [])
    assert method.propose([Request(context, 4)])[0].reason == REASON_CAPACITY
    method.close(context)
    context = method.open([3] * 9, Sampling(temperature=0.0))
    assert method.propose([Request(context, 4)])[0].reason == REASON_ROWS_MISSING
    method.close(context)


@pytest.mark.parametrize("confidences", [False, True])
@TEMPERATURES
def test_without_a_confidence_head(
    tmp_path: Path, target: Path, confidences: bool, temperature: float
) -> None:
    """The draft's own probabilities stand in where they are asked for."""
    state = write_dspark(tmp_path, enable_confidence_head=False, confidence_head_with_markov=None)
    method = load(tmp_path, target, confidences=confidences)
    walk = Walk(state, target, next_token=False)
    (draft,) = method.propose([Request(advanced(method, taps(12), 5, temperature), 4)])
    tokens, _, own = walk(taps(12), 5, 4, temperature)
    assert list(draft.ids) == tokens
    assert list(draft.confidences) == pytest.approx(own if confidences else [], rel=1e-3)


def test_hybrid_chooses_from_it(tmp_path: Path, target: Path) -> None:
    write_dspark(tmp_path)
    settings = DraftSettings(
        methods=("hybrid", "dspark"), hybrid_neural="dspark", dspark=str(tmp_path),
        target=str(target), dtype="float32", kv_pages=64,
    )  # fmt: skip
    methods = load_methods(settings, lambda _: None)
    hybrid, own = methods["hybrid"], methods["dspark"]
    assert hybrid.info.rows == own.info.rows and own.info.name in hybrid.info.name
    context = hybrid.open(list(range(3, 12)), Sampling(temperature=0.0))
    hybrid.update(context, 9, [20], [block(0, taps(9))])
    (draft,) = hybrid.propose([Request(context, 4)])
    assert draft.source == "dspark" and len(draft.ids) == 4


def without(*names: str) -> Any:
    def change(state: State) -> State:
        return {name: value for name, value in state.items() if name not in names}

    return change


def resized(name: str, *shape: int) -> Any:
    return lambda state: state | {name: torch.zeros(shape)}


def same(state: State) -> State:
    return state


W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@pytest.mark.parametrize(
    ("tensors", "change", "named"),
    [
        pytest.param(without(W1), {}, W1, id="no-w1"),
        pytest.param(without(W2), {}, W2, id="no-w2"),
        pytest.param(resized(W1, VOCAB, RANK + 1), {}, W1, id="rank-of-w1"),
        pytest.param(resized(W2, RANK, VOCAB), {}, W2, id="w2-turned"),
        pytest.param(same, {"markov_rank": RANK + 2}, W1, id="rank-of-config"),
        pytest.param(same, {"markov_rank": 0}, "markov_rank", id="rank-zero"),
        pytest.param(same, {"markov_rank": None}, "markov_rank", id="rank-missing"),
        pytest.param(same, {"markov_head_type": "gated"}, "gate_proj", id="type"),
        pytest.param(same, {"markov_head_type": None}, "markov_head_type", id="type-missing"),
        pytest.param(
            without("confidence_head.proj.weight"), {}, "confidence_head", id="no-confidence"
        ),
        pytest.param(same, {"sample_from_anchor": None}, "sample_from_anchor", id="df45-slots"),
        pytest.param(same, {"mask_token_id": None}, "mask_token_id = None", id="df11-no-mask"),
        pytest.param(same, {"mask_token_id": 0}, "mask_token_id = 0", id="df11-mask-is-pad"),
        pytest.param(same, {"mask_token_id": 2}, "mask_token_id = 2", id="df11-mask-is-eos"),
        pytest.param(same, {"mask_token_id": -1}, "mask_token_id = -1", id="df12-negative"),
        pytest.param(same, {"mask_token_id": VOCAB}, "mask_token_id = 96", id="df12-vocabulary"),
        pytest.param(same, BASE, "architectures", id="a-dflash-checkpoint"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_at_start(
    tmp_path: Path, target: Path, tensors: Any, change: dict[str, Any], named: str
) -> None:
    state = write_dspark(tmp_path)
    save_file(tensors(state), tmp_path / "model.safetensors")
    rewrite_config(tmp_path, change)
    with pytest.raises(SpecwireError) as caught:
        load(tmp_path, target)
    assert caught.value.reason is Reason.CHECKPOINT_INVALID
    assert caught.value.message.startswith("dspark: ") and named in caught.value.message


def test_a_folder_that_is_not_there_is_named(target: Path) -> None:
    with pytest.raises(SpecwireError, match=r"dspark is '/nonexistent/nowhere'; accepted: "):
        load(Path("/nonexistent/nowhere"), target)

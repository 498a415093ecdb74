"""Every published layout against the equations: what a checkpoint means, and that no other reading
of it would pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import CheckpointError
from engine.models.dflash import Block, DFlashModel
from engine.models.draft_dialects import parse_draft
from engine.models.draft_loading import DraftTarget, LoadedDraft, load_dflash, load_dspark
from engine.models.draft_options import DFlashOptions
from engine.models.dspark import DSparkModel
from engine.weights import fingerprint
from tests.engine.draft_reference import (
    DEEPSPEC,
    MASK,
    SPECULATORS,
    SPECULATORS_DSPARK,
    TRIMMED,
    WINDOW,
    ZLAB,
    Config,
    F,
    Meaning,
    Modes,
    S,
    State,
    block_logits,
    body_tensors,
    entering,
    map_tensors,
    markov_tensors,
    own_tables,
    scattered_ids,
    target_tables,
    walk,
    write,
)
from tests.engine.tiny import HIDDEN, KERNELS, VOCAB, rewrite_config, write_llama

FULL: Modes = ((False, None),) * 3
MIXED: Modes = ((True, WINDOW), (True, WINDOW), (False, None))
MIXED_KEYS = {"layer_types": [S, S, F], "sliding_window": WINDOW}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


def merged(base: Config, **changes: Any) -> Config:
    """Objects are merged, one level deep."""
    return base | {
        key: base[key] | value if isinstance(value, dict) and key in base else value
        for key, value in changes.items()
    }


@dataclass(frozen=True)
class Case:
    """A checkpoint and its meaning. `ids`: the trimmed head's tokens, in the order of the file."""

    config: Config
    entered: tuple[int, ...] = (1, 3)
    first: int = 1
    modes: Modes = FULL
    own: bool = False
    ids: Tensor | None = None
    markov: str = ""
    confidence: str = ""
    vector: Any = None
    turns: dict[str, Any] = field(default_factory=dict)

    def write(self, directory: Path, target: Path) -> tuple[State, Meaning]:
        torch.manual_seed(11)
        rows = VOCAB if self.ids is None else len(self.ids)
        state = body_tensors(len(self.entered))
        embedding, head = target_tables(target)
        if self.own or rows < VOCAB:
            state |= own_tables(rows)
            embedding, head = state["embed_tokens.weight"], state["lm_head.weight"]
        if self.ids is not None:
            state |= map_tensors(self.ids)
        if self.markov:
            with_markov = {"": None, "plain": False, "with_markov": True}[self.confidence]
            state |= markov_tensors(self.markov, with_markov, rows)
        write(directory, self.config, state)
        mask = embedding[MASK]
        if self.vector is not None:
            mask = torch.randn(HIDDEN).bfloat16().float()
            torch.save(self.vector(mask), directory / "mask_embedding.pt")
        ids = torch.arange(VOCAB) if self.ids is None else self.ids
        meaning = Meaning(
            self.entered, self.first, self.modes, mask, embedding, head, ids,
            markov=self.markov, confidence=self.confidence, **self.turns,
        )  # fmt: skip
        return state, meaning

    def load(self, directory: Path, target: Path, kernels: str = "torch") -> LoadedDraft:
        options = DFlashOptions(page_count=64, weight_dtype=torch.float32, kernels=kernels)
        loader = load_dspark if self.markov else load_dflash
        return loader(directory, str(target), options)


IDS, SHUFFLED = scattered_ids(), scattered_ids().roll(7).flip(0)
SPEC_MIXED = {"transformer_layer_config": MIXED_KEYS}
CASES: dict[str, Case] = {
    "zlab": Case(merged(ZLAB, **MIXED_KEYS), modes=MIXED),
    "zlab_newer": Case(
        merged(
            ZLAB, block_size=None, is_causal=False, rope_theta=None,
            rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1234.0},
            dflash_config={"block_size": 5, "use_swa": True, "swa_window_size": WINDOW},
        ),
        modes=((False, WINDOW),) * 3, turns={"theta": 1234.0, "stretch": 2.0},
    ),
    "zlab_causal": Case(merged(ZLAB, dflash_config={"causal": True}), modes=((True, None),) * 3),
    "zlab_interleaved": Case(
        ZLAB | {"is_neox_style": False}, turns={"interleaved": True}
    ),
    "zlab_mask_vector": Case(ZLAB, vector=lambda v: v),
    "zlab_mask_dict": Case(ZLAB, vector=lambda v: {"embedding": v[None], "mask_token_id": MASK}),
    "zlab_last_layer": Case(
        merged(ZLAB, dflash_config={"target_layer_ids": [1, 2, 3]}), entered=(2, 3, 4)
    ),
    "deepspec": Case(DEEPSPEC, first=0, own=True, markov="vanilla", confidence="with_markov"),
    "deepspec_gated": Case(
        DEEPSPEC | {"markov_head_type": "gated", "confidence_head_with_markov": False},
        first=0, markov="gated", confidence="plain",
    ),
    "deepspec_rnn": Case(
        DEEPSPEC | {"markov_head_type": "rnn", "sample_from_anchor": False},
        markov="rnn", confidence="with_markov",
    ),
    "deepspec_vector": Case(
        DEEPSPEC | {"enable_confidence_head": False}, first=0, markov="vanilla",
        vector=lambda v: v.bfloat16(),
    ),
    "deepspec_dflash": Case(
        DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}, first=0, own=True
    ),
    "speculators": Case(merged(SPECULATORS, **SPEC_MIXED), modes=MIXED, ids=IDS),
    "speculators_non_causal": Case(
        merged(SPECULATORS, sliding_window_non_causal=True, **SPEC_MIXED),
        modes=((False, WINDOW), (False, WINDOW), (False, None)), ids=SHUFFLED,
    ),
    "speculators_whole": Case(
        SPECULATORS | {"draft_vocab_size": VOCAB, "sample_from_anchor": True}, first=0
    ),
    "speculators_dspark": Case(
        merged(SPECULATORS_DSPARK, **SPEC_MIXED),
        first=0, modes=MIXED, ids=SHUFFLED, markov="vanilla", confidence="plain",
    ),
    "speculators_rnn": Case(
        SPECULATORS_DSPARK | {"markov_head_type": "rnn", "sample_from_anchor": False,
                              "confidence_head_with_markov": True},
        ids=IDS, markov="rnn", confidence="with_markov",
    ),
}  # fmt: skip


def misreadings(case: Case, m: Meaning, target: Path) -> list[tuple[str, Meaning]]:
    """Each other way to read the checkpoint that some loader has had."""
    embedding, head = target_tables(target)
    found = [
        ("taps one late", replace(m, entered=tuple(min(i + 1, 4) for i in m.entered))),
        ("taps one early", replace(m, entered=tuple(i - 1 for i in m.entered))),
        ("rotation style", replace(m, interleaved=not m.interleaved)),
        ("theta from defaults", replace(m, theta=1e6)),
        ("causality of all layers turned", replace(m, modes=tuple((not c, w) for c, w in m.modes))),
        ("mask row", replace(m, mask=m.embedding[MASK + 1])),
    ]
    if m.stretch != 1:
        found.append(("no scaling", replace(m, stretch=1.0)))
    if any(window for _, window in m.modes):
        found.append(("no window", replace(m, modes=tuple((c, None) for c, _ in m.modes))))
        wider = tuple((c, w and w + 1) for c, w in m.modes)
        found.append(("window without itself", replace(m, modes=wider)))
    if m.modes == MIXED:
        found.append(("global causality", replace(m, modes=tuple((True, w) for _, w in m.modes))))
    if case.vector is not None:
        found.append(("mask row instead of the vector", replace(m, mask=m.embedding[MASK])))
    if case.own or case.ids is not None:
        found.append(("embedding of the target", replace(m, embedding=embedding)))
    if case.own:
        found.append(("head of the target", replace(m, head=head)))
    if case.ids is not None:
        found.append(("d2t left out", replace(m, target_ids=torch.arange(TRIMMED))))
        offsets = case.ids - torch.arange(TRIMMED)
        found.append(("d2t as ids", replace(m, target_ids=offsets % VOCAB)))
    if m.markov and m.markov != "vanilla":
        found.append(("vanilla head", replace(m, markov="vanilla")))
    return found


def rows_of(model: DFlashModel, states: list[Tensor]) -> Tensor:
    """What a target sends: outputs of the layers that the draft names."""
    return torch.cat([states[layer + 1] for layer in model.config.tap_ids], -1)


def blocks(model: DFlashModel, sessions: list[tuple[list[Tensor], int]]) -> list[Block]:
    found = []
    for states, anchor in sessions:
        table = model.pool.allocate(0)
        model.write_context(table, 0, rows_of(model, states))
        found.append(Block(table, anchor, len(states[0])))
    return found


def second(logits: Tensor) -> Tensor:
    """Not the best one: a walk that ignores what was chosen would be found out."""
    return logits.topk(2).indices[..., 1]


def close(ours: Tensor, theirs: Tensor) -> bool:
    """-inf, where a trimmed head has no row, must stand in the same places."""
    return torch.allclose(ours.double(), theirs, atol=2e-4, rtol=1e-4)


SESSIONS = [(21, 1, 7), (3, 2, 11), (30, 3, 90)]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_a_layout_means_what_its_publisher_means(
    tmp_path: Path, target: Path, name: str, kernels: str
) -> None:
    """DF-5, DF-8, DF-17, DF-20, DF-26, DF-34, DF-44, DF-45: taps, rotation, target ids, causality
    per layer, the mask vector and the slot mode; each read otherwise gives other logits."""
    case = CASES[name]
    state, meaning = case.write(tmp_path, target)
    model = case.load(tmp_path, target, kernels).model
    sessions = [(entering(count, seed), anchor) for count, seed, anchor in SESSIONS]
    readings = [("as meant", meaning)]
    if kernels == "torch":
        readings += misreadings(case, meaning, target)
    assert model.max_draft_tokens == 5 - case.first
    if not case.markov:
        ours = model.propose_logits(blocks(model, sessions))
        found = {
            how: torch.stack([block_logits(state, m, rows, a) for rows, a in sessions])
            for how, m in readings
        }
    else:
        assert isinstance(model, DSparkModel)
        proposed = model.propose(blocks(model, sessions), lambda _, logits: second(logits))
        ours = proposed.logits
        walks = {
            how: [walk(state, m, rows, a, lambda _, x: int(second(x))) for rows, a in sessions]
            for how, m in readings
        }
        found = {how: torch.stack([one.logits for one in each]) for how, each in walks.items()}
        assert proposed.tokens.tolist() == [one.tokens for one in walks["as meant"]]
        if case.confidence:
            assert proposed.confidence is not None
            expected = torch.tensor([one.confidences for one in walks["as meant"]])
            torch.testing.assert_close(proposed.confidence, expected, atol=1e-4, rtol=1e-4)
        else:
            assert proposed.confidence is None
    assert close(ours, found.pop("as meant"))
    wrong = [how for how, logits in found.items() if close(ours, logits)]
    assert not wrong, "a wrong reading gives the same logits"


@pytest.mark.parametrize("name", ["zlab", "deepspec", "speculators"])
def test_the_other_slot_mode_gives_other_logits(tmp_path: Path, target: Path, name: str) -> None:
    """DF-1, DF-44: the same block, one slot off."""
    case = CASES[name]
    state, meaning = case.write(tmp_path, target)
    model = case.load(tmp_path, target).model
    rows = entering(12)
    ours = model.propose_logits(blocks(model, [(rows, 7)]))[0]
    other = block_logits(state, replace(meaning, first=1 - case.first), rows, 7)
    count = min(len(ours), len(other))
    assert not close(ours[:count], other[:count])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_walk_follows_the_token_that_was_drawn(tmp_path: Path, target: Path, kind: str) -> None:
    """Another draw at the first slot changes the second's logits, and the third's only where there
    is a state."""
    case = replace(CASES["deepspec"], config=DEEPSPEC | {"markov_head_type": kind}, markov=kind)
    case.write(tmp_path, target)
    model = case.load(tmp_path, target).model
    assert isinstance(model, DSparkModel)
    found = []
    for first in (20, 21):
        given = [torch.tensor([first]), torch.tensor([33]), *[torch.tensor([34])] * 3]
        block = blocks(model, [(entering(9), 7)])
        found.append(model.propose(block, lambda slot, _, given=given: given[slot]).logits[0])
    same = [bool(torch.allclose(a, b)) for a, b in zip(*found, strict=True)]
    assert same[:2] == [True, False]
    assert same[2:] == [kind != "rnn"] * 3


def change(case: str, **changes: Any) -> Case:
    return replace(CASES[case], config=merged(CASES[case].config, **changes))


def body(**changes: Any) -> dict[str, Any]:
    return {"transformer_layer_config": changes}


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        pytest.param("zlab", {"rope_theta": None}, "rope_theta = None", id="df9-no-theta"),
        pytest.param("zlab", {"head_dim": None}, "head_dim = None", id="head-dim"),
        pytest.param("zlab", {"num_key_value_heads": None}, "num_key_value_heads", id="kv-heads"),
        pytest.param("zlab", {"rms_norm_eps": None}, "rms_norm_eps", id="eps"),
        pytest.param("zlab", {"block_size": None}, "block_size = None", id="block"),
        pytest.param(
            "zlab", {"dflash_config": {"block_size": 4}}, "conflicting block_size", id="two-blocks"
        ),
        pytest.param("zlab", {"mask_token_id": 8}, "conflicting mask_token_id", id="two-masks"),
        pytest.param(
            "zlab",
            {"is_neox_style": False, "rope_is_neox_style": True},
            "RoPE styles",
            id="df34-two-styles",
        ),
        pytest.param("zlab", {"is_neox_style": 1}, "is_neox_style = 1", id="df34-style"),
        pytest.param(
            "zlab", {"dflash_config": {"projector_type": "domino"}}, "domino", id="domino"
        ),
        pytest.param(
            "zlab_causal", {"use_sliding_window": True}, "layer_types", id="windows-unsaid"
        ),
        pytest.param("zlab", {"quantization_config": {}}, "quantization_config", id="quantised"),
        pytest.param("deepspec", {"target_layer_ids": [-1, 2]}, r"\[0, 4\)", id="embedding-as-tap"),
        pytest.param(
            "deepspec", {"sample_from_anchor": None}, "sample_from_anchor", id="df45-deepspec"
        ),
        pytest.param(
            "deepspec",
            {"confidence_head_with_markov": None},
            "confidence_head_with_markov",
            id="confidence-unsaid",
        ),
        pytest.param(
            "deepspec_dflash",
            {"enable_confidence_head": True},
            "markov_rank is 0",
            id="confidence-alone",
        ),
        pytest.param(
            "deepspec", {"markov_head_type": "gru"}, "vanilla, gated, rnn", id="head-type"
        ),
        pytest.param("speculators", {"sample_from_anchor": None}, "no default", id="df45-spec"),
        pytest.param(
            "speculators", {"draft_vocab_size": None}, "draft_vocab_size", id="df25-unsaid"
        ),
        pytest.param("speculators", {"draft_vocab_size": 97}, "96", id="df25-more-than-all"),
        pytest.param("speculators", {"mask_token_id": None}, "mask_token_id", id="df11-spec"),
        pytest.param(
            "speculators", {"aux_hidden_state_layer_ids": None}, "no default", id="df31-spec"
        ),
        pytest.param(
            "speculators",
            {"aux_hidden_state_layer_ids": [0, 3]},
            r"\[1, 5\)",
            id="entered-embedding",
        ),
        pytest.param(
            "speculators", {"aux_hidden_state_layer_ids": [1, 5]}, r"\[1, 5\)", id="beyond-the-last"
        ),
        pytest.param(
            "speculators", {"aux_hidden_state_layer_ids": [3, 1]}, "increasing", id="df32-spec"
        ),
        pytest.param(
            "speculators", {"target_hidden_size": 32}, "target_hidden_size", id="df35-spec"
        ),
        pytest.param("speculators", body(vocab_size=50), "config.vocab_size = 50", id="vocabulary"),
        pytest.param("speculators", body(rope_parameters=None), "rope_theta", id="df9-spec"),
        pytest.param("speculators", body(model_type="gemma4"), "qwen3, llama", id="body-type"),
        pytest.param("speculators", body(attention_bias=True), "attention_bias", id="bias"),
        pytest.param(
            "speculators", {"transformer_layer_config": 3}, "an object", id="body-missing"
        ),
        pytest.param("speculators", {"speculators_config": 3}, "with a verifier", id="no-section"),
        pytest.param(
            "speculators",
            {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
            r"verifier.architectures = .*LlamaForCausalLM",
            id="df35-verifier",
        ),
        pytest.param(
            "speculators",
            {"speculators_config": {"algorithm": "dspark"}},
            "algorithm",
            id="algorithm",
        ),
        pytest.param(
            "speculators", {"speculators_model_type": "eagle3"}, "dflash, dspark", id="type"
        ),
        pytest.param("speculators", {"architectures": ["Other"]}, "DFlashSpeculator", id="class"),
        pytest.param("speculators_dspark", {"markov_rank": None}, "markov_rank", id="rank-unsaid"),
        pytest.param(
            "speculators_dspark",
            {"enable_confidence_head": None},
            "enable_confidence_head",
            id="head-unsaid",
        ),
    ],
)
def test_what_is_unsaid_or_untrue_is_refused(
    tmp_path: Path, target: Path, case: str, changes: Config, named: str
) -> None:
    """Other loaders' defaults for these keys differ, or the draft is not for this target."""
    changed = change(case, **changes)
    changed.write(tmp_path, target)
    rewrite_config(tmp_path, {})  # drops what is None
    with pytest.raises(CheckpointError, match=named):
        changed.load(tmp_path, target)


def paths(config: Config, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += paths(value, (*before, key))
    return found


@pytest.mark.parametrize("name", ["zlab_newer", "deepspec", "speculators_dspark"])
def test_nonsense_in_a_config_is_a_refusal(target: Path, name: str) -> None:
    """Whatever stands behind a key: a description, or a CheckpointError; never another error."""
    case, known = CASES[name], DraftTarget(str(target)).described
    odd = [None, True, 0, -1, 1.5, "x", [], [[]], ["x"], [3, 3], {}, {"x": []}, 10**30]
    refused = 0
    for path in paths(case.config):
        for value in odd:
            config = json.loads(json.dumps(case.config))
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            try:
                parse_draft(config, known, "dspark" if case.markov else "dflash")
            except CheckpointError as error:
                refused += 1
                assert len(str(error)) < 600
    assert refused > 3 * len(paths(case.config))
    for config in (None, [], "x", {}):
        with pytest.raises(CheckpointError):
            parse_draft(config, known, "dflash")


def without(*names: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if name not in names}


def set_to(name: str, value: Tensor) -> Callable[[State], State]:
    return lambda state: state | {name: value}


@pytest.mark.parametrize(
    ("name", "tensors", "named"),
    [
        pytest.param("speculators", without("lm_head.weight"), "lm_head.weight", id="df25-no-head"),
        pytest.param("speculators", without("d2t", "t2d"), "d2t is missing", id="df25-no-map"),
        pytest.param(
            "speculators", set_to("d2t", torch.full((TRIMMED,), 90)), "d2t", id="df36-range"
        ),
        pytest.param(
            "speculators", set_to("d2t", torch.full((TRIMMED,), -9)), "d2t", id="df36-below"
        ),
        pytest.param(
            "speculators", set_to("d2t", -torch.arange(TRIMMED)), "distinct", id="df36-twice"
        ),
        pytest.param(
            "speculators", set_to("d2t", torch.zeros(TRIMMED)), "float32|F32", id="d2t-float"
        ),
        pytest.param(
            "speculators",
            set_to("t2d", torch.ones(VOCAB, dtype=torch.bool)),
            "different tokens",
            id="t2d",
        ),
        pytest.param(
            "speculators_whole",
            set_to("d2t", torch.arange(VOCAB).flip(0) - torch.arange(VOCAB)),
            "reorders",
            id="a-permuted-head-of-the-target",
        ),
        pytest.param(
            "deepspec_gated", without("markov_head.gate_proj.bias"), "gate_proj", id="gate"
        ),
        pytest.param(
            "deepspec_rnn", without("markov_head.joint_proj.weight"), "joint_proj", id="rnn"
        ),
        pytest.param(
            "deepspec",
            set_to("markov_head.gate_proj.bias", torch.zeros(6)),
            "gate_proj",
            id="unread",
        ),
        pytest.param("zlab", set_to("mask_hidden", torch.zeros(HIDDEN)), "mask_hidden", id="df26"),
        pytest.param(
            "speculators",
            set_to("verifier_lm_head.weight", torch.zeros(2)),
            "verifier_lm_head",
            id="df18",
        ),
    ],
)
def test_tensors_are_those_of_the_layout(
    tmp_path: Path, target: Path, name: str, tensors: Callable[[State], State], named: str
) -> None:
    """DF-18, DF-25, DF-36: nothing missing, nothing left over, and a map that is one."""
    case = CASES[name]
    state, _ = case.write(tmp_path, target)
    save_file(tensors(state), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=named):
        case.load(tmp_path, target)


def test_a_draft_of_another_width_needs_tables_of_its_own(tmp_path: Path, target: Path) -> None:
    """DF-25, DF-35: the target's embedding cannot stand in for one of another width."""
    case = replace(CASES["deepspec_dflash"], own=False, config=change(
        "deepspec_dflash", hidden_size=32).config)  # fmt: skip
    case.write(tmp_path, target)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight is missing.*\[96, 32\]"):
        case.load(tmp_path, target)


class Ran:
    """Unpickled, it would leave a file behind."""

    path = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (Ran.path, "w"))


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        (b"", "cannot be read"),
        (b"no tensors here", "cannot be read"),
        (torch.zeros(HIDDEN + 1), "shape"),
        (torch.zeros(2, HIDDEN), "shape"),
        (torch.zeros(HIDDEN, dtype=torch.int64), "no tensor"),
        (torch.full((HIDDEN,), torch.nan), "finite"),
        ({"mask_token_id": MASK}, "no tensor"),
        ({"embedding": torch.zeros(HIDDEN), "mask_token_id": MASK + 1}, "mask_token_id 10"),
        (Ran(), "cannot be read"),
    ],
)
def test_a_mask_vector_that_is_none_is_refused(
    tmp_path: Path, target: Path, stored: Any, named: str
) -> None:
    """DF-26: only plain tensors are read, and nothing in the file is run."""
    case, path = CASES["zlab"], tmp_path / "mask_embedding.pt"
    case.write(tmp_path, target)
    before = fingerprint(tmp_path)
    Ran.path = str(tmp_path / "ran")
    if isinstance(stored, bytes):
        path.write_bytes(stored)
    else:
        torch.save(stored, path)
    assert fingerprint(tmp_path) != before, "the vector is part of the draft"
    with pytest.raises(CheckpointError, match=named) as caught:
        case.load(tmp_path, target)
    assert str(tmp_path) not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_an_anchor_that_is_the_mask_id_keeps_its_embedding(tmp_path: Path, target: Path) -> None:
    """DF-21: the target may choose the token; only masked slots take the vector."""
    case = CASES["zlab_mask_vector"]
    state, meaning = case.write(tmp_path, target)
    model, rows = case.load(tmp_path, target).model, entering(8)
    ours = model.propose_logits(blocks(model, [(rows, MASK)]))[0]
    assert close(ours, block_logits(state, meaning, rows, MASK))


def test_the_handshake_says_how_it_turns_and_which_tokens_it_knows(
    tmp_path: Path, target: Path
) -> None:
    """Two orders of one map are the same map; another map is another."""
    hashes = []
    for ids in (IDS, SHUFFLED, scattered_ids(seed=9)):
        case = replace(CASES["speculators"], ids=ids)
        case.write(tmp_path, target)
        hashes.append(case.load(tmp_path, target).model.vocabulary.d2t_hash)
    assert hashes[0] == hashes[1] != hashes[2] and len(hashes[0]) == 32
    for name in ("speculators_whole", "zlab"):
        CASES[name].write(tmp_path, target)
        (tmp_path / "mask_embedding.pt").unlink(missing_ok=True)
        assert CASES[name].load(tmp_path, target).model.vocabulary.d2t_hash == ""

"""A DSpark draft with latent attention behind the draft service, beside a DeepSeek target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draft_svc.info import drafter_infos
from draft_svc.loading import load_methods
from draft_svc.methods.base import Request
from draft_svc.settings import DraftSettings
from engine.api import Sampling
from specwire.errors import SpecwireError
from tests.engine.test_mla_draft import BLOCK, DSPARK, block_states, write_draft
from tests.engine.tiny import HIDDEN, LATENT, write_model
from tests.service.test_draft_dspark import block


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_model(directory, "deepseek_v2", **LATENT | {"first_k_dense_replace": 4})
    return directory


def settings(draft: Path, target: Path, **changes: object) -> DraftSettings:
    options = {"dtype": "float32", "kv_pages": 64, "page_tokens": 4, "head_dtype": "model"}
    return DraftSettings(
        methods=("dspark",), dspark=str(draft), target=str(target), **options | changes
    )


def test_sessions_propose_what_the_equations_say(tmp_path: Path, target: Path) -> None:
    state = write_draft(tmp_path, DSPARK)
    method = load_methods(settings(tmp_path, target), lambda _: None)["dspark"]
    tables = load_file(target / "model.safetensors")
    embedding, head = tables["model.embed_tokens.weight"], tables["lm_head.weight"].double()
    w1, w2 = (state[f"markov_head.markov_{n}.weight"].double() for n in ("w1", "w2"))
    contexts, expected = [], []
    for count in (3, 30):
        generator = torch.Generator().manual_seed(count)
        rows = torch.randn(count, 2 * HIDDEN, generator=generator).bfloat16()
        context = method.open([3] * count, Sampling(temperature=0.0))
        method.update(context, count, [7], [block(0, rows)])
        contexts.append(context)
        previous, tokens = 7, []
        for h in block_states(state, DSPARK, rows.float(), embedding, 7):
            previous = int((head @ h + w2 @ w1[previous]).argmax())
            tokens.append(previous)
        expected.append(tokens)
    found = method.propose([Request(context, BLOCK) for context in contexts])
    assert [list(proposal.ids) for proposal in found] == expected


def test_an_fp8_layout_is_told_and_a_dense_backend_refused(tmp_path: Path, target: Path) -> None:
    write_draft(tmp_path, DSPARK)
    asked = settings(tmp_path, target, kv_dtype="fp8")
    methods = load_methods(asked, lambda _: None)
    infos = [method.info for method in methods.values()]
    told = drafter_infos(infos, "dspark")[0].attention
    assert (told.chosen, told.kv_dtype) == ("TORCH_MLA", "fp8_ds_mla")
    assert told.kv_bytes_per_token == 2 * (24 + 4 + 16)
    with pytest.raises(SpecwireError, match="MLA not supported"):
        load_methods(settings(tmp_path, target, attention_backend="CPU_ATTN"), lambda _: None)

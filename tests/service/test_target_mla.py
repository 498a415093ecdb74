"""A DeepSeek target behind the target service: text and bits as for any other target."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.runner import NativeEngine
from specwire.v1 import target_pb2
from target_svc.engines.native import load_native
from target_svc.info import info_response
from target_svc.settings import TargetSettings
from tests.engine.tiny import LATENT, load_tiny, random_ids, reference, write_model
from tests.service.target_harness import open_target, target, verify
from tests.service.test_target_same_bits import generate, prompts

EXPERTS = LATENT | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("deepseek")
    return directory, write_model(directory, "deepseek_v3", **EXPERTS)


def load(directory: Path, pages: int, **options: Any) -> NativeEngine:
    return load_tiny(
        directory,
        kv_pages=pages,
        page_tokens=8,
        prefill_chunk=16,
        kv_bucket=32,
        max_length=min(160, pages * 8),
        **options,
    )


async def test_text_is_that_of_transformers(made: tuple[Path, Any]) -> None:
    directory, model = made
    ids = random_ids(21)
    prompt = list(ids)
    async with target(load(directory, 40)) as service:
        peer = service.peer()
        await peer.send(open_target(prompt, 20, ignore_eos=True))
        verdict = await peer.verdict()
        ids += verdict.tokens
        accepted = 0
        while not verdict.finish:
            draft = [int(reference(model, ids)[-1].argmax()), 7, 7]
            await peer.send(verify(verdict.step_id + 1, verdict.new_len, draft))
            verdict = await peer.verdict()
            accepted += verdict.accepted
            ids += verdict.tokens
        await peer.send(target_pb2.CloseSession(key=verdict.key))
        await peer.reply()
        await service.until_idle()
    assert accepted > 5
    for at in range(len(prompt), len(ids)):
        assert ids[at] == int(reference(model, ids[:at])[-1].argmax())


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
async def test_preemption_hits_and_drafts_change_no_bit(
    made: tuple[Path, Any], kv_dtype: str
) -> None:
    """L2 with experts and latent KV: an expert's rows must not depend on what drafts guess."""
    directory, _ = made
    async with target(load(directory, 200, kv_dtype=kv_dtype)) as service:
        plain = [
            await generate(service, n, prompt, no_prefix_cache=True)
            for n, prompt in enumerate(prompts())
        ]
    engine = load(directory, 30, kv_dtype=kv_dtype)
    async with target(engine, preempt_idle_ms=100) as service:
        crowd = await asyncio.gather(
            *(generate(service, n, p, plain[n]) for n, p in enumerate(prompts()))
        )
        again = [await generate(service, n, p, plain[n]) for n, p in enumerate(prompts())]
        assert service.count("preemptions") > 0
        assert service.count("prompt_tokens", source="cache") > 0
        await service.app.scheduler.idle.wait()
    assert crowd == plain and again == plain
    engine.check_integrity()


def test_the_service_says_what_it_runs(made: tuple[Path, Any]) -> None:
    settings = TargetSettings(model=str(made[0]), kv_pages=16, threads=1, kv_dtype="fp8")
    told = info_response(load_native(settings).engine, settings, 1, "hash").attention
    assert (told.chosen, told.kv_dtype) == ("TORCH_MLA", "fp8_ds_mla")
    assert told.kv_bytes_per_token == 4 * (24 + 4 + 16)

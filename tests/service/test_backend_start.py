"""Services and their attention: refused before any weight is read, told in GetInfo, compared by
nobody.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.handshake import check_attention, check_drafter
from coordinator.info_view import notes, worker_table
from draft_svc.info import drafter_infos
from draft_svc.loading import load_methods
from draft_svc.settings import DraftSettings
from engine.weights import Weights
from specwire.errors import Reason, SpecwireError
from specwire.info import info_from
from specwire.process import run_service
from specwire.v1 import common_pb2, draft_pb2, generate_pb2, target_pb2
from target_svc.engines.native import load_native
from target_svc.info import info_response
from target_svc.settings import TargetSettings
from tests.engine.tiny import write_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    write_llama(directory)
    return directory


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to read weights fails the test."""

    def fail(*_: object) -> None:
        raise AssertionError("weights were read before the refusal")

    monkeypatch.setattr(Weights, "take", fail)


def target_settings(directory: Path, **changes: Any) -> TargetSettings:
    return TargetSettings(model=str(directory), kv_pages=16, threads=1, **changes)


def draft_settings(**changes: Any) -> DraftSettings:
    return DraftSettings(methods=("dflash",), kv_pages=16, threads=1, **changes)


REFUSED = [
    ({"attention_backend": "FLASHINFER"}, "compute capability not supported (cpu; accepted: 8."),
    ({"attention_backend": "inherit"}, "Nothing to inherit for the "),
    ({"attention_backend": "SDPA"}, "Unknown attention backend 'SDPA'"),
    ({"kv_dtype": "fp8"}, "CPU_ATTN: [kv_cache_dtype not supported (fp8; accepted: auto, float32"),
    ({"cuda_graph_mode": "FULL"}, "CUDA-graph mode FULL not possible: no CUDA graphs on the cpu"),
    ({"attention_backend": "CPU_ATTN", "kernels": "torch"}, "native kernels are switched off"),
]


@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_the_target_refuses_before_weights(target: Path, change: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecwireError) as caught:
        load_native(target_settings(target, **change))
    assert caught.value.reason is Reason.BACKEND_UNAVAILABLE
    assert text in str(caught.value.args[0]) and "TORCH_SDPA: [" in str(caught.value.args[0])


@pytest.mark.model
@pytest.mark.usefixtures("unreadable")
@pytest.mark.parametrize(("change", "text"), REFUSED)
def test_the_draft_refuses_before_weights(change: dict[str, Any], text: str) -> None:
    """AB-8, DF-28: with its own settings, for its own layers; the process is not ready, and
    ends."""
    with pytest.raises(SpecwireError) as caught:
        load_methods(draft_settings(**change), lambda _: None)
    assert caught.value.reason is Reason.BACKEND_UNAVAILABLE
    said = str(caught.value.args[0])
    assert text in said and "the dflash draft on cpu" in said and "non-causal" in said


def test_the_process_ends_with_2_and_all_reasons(
    capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    """The message on the wire is clipped, the one on the terminal is not."""

    async def start(_: object) -> None:
        load_native(target_settings(target, attention_backend="FLASHINFER", page_tokens=48))

    with pytest.raises(SystemExit) as caught:
        run_service(start)
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.endswith("CPU_ATTN: [valid], TORCH_SDPA: [valid]}\n")
    for reason in ("dtype", "block_size", "compute capability"):
        assert f"{reason} not supported (" in error


def test_the_resolution_travels_in_get_info(target: Path) -> None:
    settings = target_settings(target, attention_backend="torch_sdpa", kv_dtype="bf16")
    before = settings.model_dump()
    engine = load_native(settings).engine
    report = info_response(engine, settings, 1, "hash").attention
    assert (report.requested, report.policy, report.chosen) == ("torch_sdpa", "name", "TORCH_SDPA")
    assert (report.kv_dtype, report.graph_mode, report.page_size_tokens) == ("bfloat16", "NONE", 16)
    assert report.kv_bytes_per_token == 4 * 2 * 2 * 16 * 2
    assert list(report.notes) == ["CUDA graphs: no CUDA graphs on the cpu"]
    assert [candidate.name for candidate in report.candidates] == ["CPU_ATTN", "TORCH_SDPA"]
    assert settings.model_dump() == before
    info = generate_pb2.GenerationServiceGetInfoResponse()
    info.workers.add(role="target", address="x", attention=report)
    server = info_from(info)
    assert notes(server) == ["target: x", "target: CUDA graphs: no CUDA graphs on the cpu"]
    column = next(c for c in worker_table(server).columns if c.header == "attention")
    assert list(column.cells) == ["TORCH_SDPA (name), CUDA graphs NONE"]
    check_attention("target", report)


@pytest.mark.model
def test_target_and_draft_choose_for_themselves(target: Path) -> None:
    """Other backends and KV dtypes on both sides; each in its own frozen settings."""
    draft = draft_settings(attention_backend="TORCH_SDPA", kernels="torch", kv_dtype="bfloat16")
    infos = [load_methods(draft, lambda _: None)["dflash"].info]
    said = drafter_infos(infos, "dflash")[0].attention
    assert (said.chosen, said.kv_dtype, said.policy) == ("TORCH_SDPA", "bfloat16", "name")
    assert list(said.candidates[0].reasons)
    engine = load_native(target_settings(target, kv_dtype="float32")).engine
    assert (engine.attention.chosen, engine.attention.kv_dtype) == ("CPU_ATTN", "float32")


@pytest.mark.parametrize(
    ("requested", "chosen", "fits"),
    [
        ("", "CPU_ATTN", True),
        ("auto", "CPU_ATTN", True),
        ("inherit", "CPU_ATTN", True),
        ("torch_sdpa", "TORCH_SDPA", True),
        ("TRITON_ATTN", "FLASHINFER", False),
        ("TRITON_ATTN", "", False),
    ],
)
def test_a_worker_that_runs_what_it_was_not_asked_for_is_not_used(
    requested: str, chosen: str, fits: bool
) -> None:
    """AB-3: the handshake looks at each worker's report, and compares none with another."""
    report = common_pb2.AttentionReport(requested=requested, chosen=chosen)
    drafter = draft_pb2.DrafterInfo(method="dflash", max_draft_tokens=7, attention=report)
    answer = target_pb2.TargetServiceGetInfoResponse
    other = answer(attention=common_pb2.AttentionReport(chosen="OTHER", kv_dtype="fp8"))
    if fits:
        check_drafter(other, drafter)
        return
    with pytest.raises(SpecwireError, match=f"asked for {requested}, it runs '{chosen}'") as caught:
        check_drafter(other, drafter)
    assert caught.value.reason is Reason.BACKEND_UNAVAILABLE

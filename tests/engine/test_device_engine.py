"""The engine on a GPU: the same text as with torch's operators, drafts or none, alone or not."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from engine.attention import flashinfer_attn
from engine.config import EngineConfig
from engine.device import kernel_mode, numerics_fingerprint, resolve_device
from engine.errors import BackendUnavailable
from engine.kernels import triton
from engine.linear import Mode


def run(*arguments: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.device_check", *arguments]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    assert found.stdout.endswith("equal\n")


@pytest.mark.timeout(300)
def test_triton_kernels_give_the_text_of_torch_operators() -> None:
    """Under the interpreter: prompt chunks, verify blocks, filters, taps."""
    run()


@pytest.mark.gpu
def test_the_same_on_a_gpu_with_graphs() -> None:
    run("--cuda")


def test_what_cannot_be_had_is_refused_by_name() -> None:
    with pytest.raises(BackendUnavailable, match=r"device 'tpu' .*accepted: auto, cpu, cuda"):
        resolve_device("tpu")
    with pytest.raises(BackendUnavailable, match="kernels 'native' cannot be used"):
        kernel_mode("native", resolve_device("cpu").__class__("cuda"))


MODES: tuple[Mode, ...] = ("native", "torch", "triton")


def test_equal_gpus_of_a_host_compute_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that must stay exact may go on at the one when the other is lost."""
    names = {0: "GPU A", 1: "GPU A", 2: "GPU B"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    first, second, other = (
        numerics_fingerprint(EngineConfig(), "triton", torch.device("cuda", index), "TRITON_ATTN")
        for index in names
    )
    assert first == second != other


def test_another_triton_may_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it compiles the kernels, and there only."""
    found = []
    for version in ("3.6.0", "3.7.0"):
        monkeypatch.setattr(triton, "version", lambda version=version: version)
        found.append(
            [numerics_fingerprint(EngineConfig(), mode, torch.device("cpu"), "X") for mode in MODES]
        )
    changed = {mode for mode, *pair in zip(MODES, *found, strict=True) if pair[0] != pair[1]}
    assert changed == {"triton"}


def test_another_flashinfer_may_give_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it attends, and there only; nobody else asks for the package."""
    backends, found = ("FLASHINFER", "TRITON_ATTN", "FLASH_ATTN"), []
    cpu = torch.device("cpu")
    for name in backends[1:]:
        numerics_fingerprint(EngineConfig(), "torch", cpu, name)
    for version in ("0.6.1", "0.6.2"):
        package = SimpleNamespace(__version__=version)
        monkeypatch.setattr(flashinfer_attn, "library", lambda package=package: package)
        found.append([numerics_fingerprint(EngineConfig(), "torch", cpu, n) for n in backends])
    changed = {name for name, *pair in zip(backends, *found, strict=True) if pair[0] != pair[1]}
    assert changed == {"FLASHINFER"}

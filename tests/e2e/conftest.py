"""One local deployment of the default model for all end-to-end tests: three real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator import demo
from coordinator.bench_prompts import Prompt, load_prompts
from coordinator.local import LocalDeployment, LocalOptions


@pytest.fixture(scope="session")
def deployment() -> Iterator[LocalDeployment]:
    with LocalDeployment(LocalOptions()) as running:
        yield running


@pytest.fixture(scope="session")
def prompts() -> list[Prompt]:
    return load_prompts(demo.PROMPTS)


@pytest.fixture
def private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for the runtime file: no test meets another deployment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("SPECWIRE_ADDRESS", raising=False)
    return tmp_path

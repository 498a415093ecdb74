"""The draft that a target expects beside it, where it is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError, SettingRefused
from target_svc import draft_layers as draft_layers_module
from target_svc.draft_layers import draft_layers, projected_draft
from target_svc.settings import TargetSettings


def test_a_draft_that_is_not_there_is_named_as_it_was_given() -> None:
    settings = TargetSettings(warm_draft="/nope/draft")
    with pytest.raises(CheckpointError, match="warm_draft is '/nope/draft'; accepted: a local"):
        draft_layers(settings)
    with pytest.raises(CheckpointError, match="warm_draft is '/nope/draft'"):
        projected_draft(TargetSettings(warm_draft="/nope/draft", project_rows=True))


@pytest.mark.parametrize("settings", [{"warm_draft": ""}, {"model": "/another"}])
def test_no_draft_is_known_whose_projection_there_could_be(settings: dict[str, str]) -> None:
    with pytest.raises(
        SettingRefused, match="project_rows = True is not supported; accepted: false, or with warm"
    ):
        projected_draft(TargetSettings(project_rows=True, **settings))
    assert projected_draft(TargetSettings(**settings)) is None


def test_the_shipped_draft_is_found() -> None:
    found = projected_draft(TargetSettings(project_rows=True))
    assert found is not None and (found / "model.safetensors").is_file()
    assert projected_draft(TargetSettings()) is None


def test_unless_told_rows_go_through_a_projection_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_layers_module, "resolve_device", torch.device)
    assert projected_draft(TargetSettings(device="cuda")) is not None
    for other in ({"project_rows": False}, {"warm_draft": ""}, {"colocate": "dflash"}):
        assert projected_draft(TargetSettings(device="cuda", **other)) is None
    (tmp_path / "config.json").write_text("{}")
    alone = TargetSettings(device="cuda", warm_draft=str(tmp_path))
    assert projected_draft(alone) is None  # which says of its layers all that is to be known
    flags = TargetSettings.load(["--no-project-rows"]), TargetSettings.load(["--project-rows"])
    assert [settings.project_rows for settings in flags] == [False, True]

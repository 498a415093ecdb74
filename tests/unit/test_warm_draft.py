"""The draft that a target warms up for, where it is not there."""

from __future__ import annotations

import pytest

from engine.errors import CheckpointError
from target_svc.draft_layers import draft_layers
from target_svc.settings import TargetSettings


def test_a_draft_that_is_not_there_is_named_as_it_was_given() -> None:
    settings = TargetSettings(warm_draft="/nope/draft")
    with pytest.raises(CheckpointError, match="warm_draft is '/nope/draft'; accepted: a local"):
        draft_layers(settings)

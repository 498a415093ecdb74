"""The start-up check of what `exact` rests on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine import selftest
from engine.batch import Packed
from tests.load.free_model import FreeEngine


@pytest.mark.parametrize(("least", "most"), [(17, 32), (33, 64), (65, 128), (129, 9999)])
def test_rows_that_differ_in_larger_tiles_are_found_on_a_gpu(
    least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each number of rows that has tiles of its own."""
    engine = FreeEngine(8)
    engine._info = replace(engine.info, device="cuda:0")
    assert selftest.rows_independent(engine)
    forward = engine.forward

    def other(packed: Packed, *rest: Any) -> Any:
        logits, taps = forward(packed, *rest)
        assert taps is not None
        return logits, taps + 1 if least <= len(packed.ids) <= most else taps

    monkeypatch.setattr(engine, "forward", other)
    assert not selftest.rows_independent(engine)

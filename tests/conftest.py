"""Which tests nothing may run beside."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Real services that take all cores, and programs that measure.
ALONE = (HERE / "e2e", HERE / "load")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in ALONE):
            item.add_marker(pytest.mark.alone)

"""Builds the methods that the settings ask for; runs on the engine thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from draft_svc.methods.base import AnyMethod
from draft_svc.methods.ngram import NgramMethod

if TYPE_CHECKING:
    from draft_svc.settings import DraftSettings

Progress = Callable[[str], None]

# In the order they are hosted; the last one is the default.
METHODS = ("ngram", "dflash")


def load_methods(settings: DraftSettings, progress: Progress) -> dict[str, AnyMethod]:
    """Loads each method, telling about it first. Raises typed errors for what cannot be loaded."""
    loaded: dict[str, AnyMethod] = {}
    for name in settings.methods:
        progress(f"loading {name}")
        loaded[name] = _BUILDERS[name](settings)
    return loaded


def _ngram(settings: DraftSettings) -> AnyMethod:
    return NgramMethod(
        min_n=settings.ngram_min,
        max_n=settings.ngram_max,
        max_draft_tokens=settings.max_draft_tokens,
    )


_BUILDERS: dict[str, Callable[[DraftSettings], AnyMethod]] = {"ngram": _ngram}

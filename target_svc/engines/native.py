"""The native engine, loaded from the service's settings."""

from __future__ import annotations

import logging

from engine.api import Drafter
from engine.default_model import tokenizer_document
from engine.errors import BackendUnavailable, CheckpointError, EngineError
from engine.loading import load_engine
from specwire.errors import Reason, SpecwireError
from target_svc.app import Loaded
from target_svc.costs import prepared
from target_svc.settings import TargetSettings

log = logging.getLogger(__name__)


def load_native(settings: TargetSettings, drafter: Drafter | None = None) -> Loaded:
    """Loads the weights, warms up and measures steps, so that the first request finds everything
    warm. A `drafter` is loaded with it, and its part of a step is measured too."""
    try:
        engine = load_engine(settings.engine_config(settings.model), drafter)
        costs = prepared(engine, settings, drafter is not None)
        return Loaded(engine, tokenizer_document(settings.model), costs=costs)
    except BackendUnavailable as error:
        raise SpecwireError(Reason.BACKEND_UNAVAILABLE, str(error)) from error
    except CheckpointError as error:
        raise SpecwireError(Reason.CHECKPOINT_INVALID, str(error)) from error
    except EngineError as error:
        raise SpecwireError(Reason.SETTINGS_INVALID, str(error)) from error

"""One shape that is met before there are sessions: what there is no room for is left out, and what
cannot be compiled is told in words."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from engine.errors import BackendUnavailable, OutOfPages

log = logging.getLogger(__name__)


def met(shape: object, needed: bool, run: Callable[[], bool]) -> bool:
    """What `run` returns, or False where pages or memory are short, or a kernel does not compile
    that is not `needed`. Raises BackendUnavailable, naming the shape, for one that is."""
    try:
        return run()
    except OutOfPages:
        return False
    except torch.OutOfMemoryError:
        log.warning("no memory to meet %s before there are sessions", shape)
        torch.cuda.empty_cache()
        return False
    except compile_errors() as error:
        if needed:
            text = f"a kernel of the step {shape} cannot be compiled on this device: {error}"
            raise BackendUnavailable(text) from error
        log.warning("a kernel of the step %s cannot be compiled: %s", shape, error)
        return False


def compile_errors() -> tuple[type[Exception], ...]:
    """What Triton raises where it builds a kernel; nothing where there is no Triton."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)

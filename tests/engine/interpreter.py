"""Triton's interpreter without a detour that takes half of its time."""

from __future__ import annotations

from typing import Any


def make_quicker() -> None:
    """Triton prepares its language again at every call of a function by a kernel, though the kernel
    has found it prepared; once for each function is enough. For a process that only interprets."""
    from triton.runtime.interpreter import InterpretedFunction

    plain, known = InterpretedFunction.__call__, set[Any]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn)
        return plain(self, *args, **kwargs)

    InterpretedFunction.__call__ = call

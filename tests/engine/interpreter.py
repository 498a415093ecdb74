"""Triton's interpreter without detours that take most of its time, and with products whose rows do
not depend on where in a tile they are, as on a GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


def prepare() -> None:
    """For a process that only interprets; what is refused stays the same."""
    _multiply_by_row()
    _prepare_once()
    _look_for_no_overflow()
    _remember_types()


def _multiply_by_row() -> None:
    """BLAS sums the last rows of a tile in another order on some CPUs (those without AVX-512), so
    that no step would be exact there; one call for each row knows no last ones."""
    from triton.runtime import interpreter

    def matmul(a: Any, b: Any, **kwargs: Any) -> Any:
        return np.matmul(a[..., :, None, :], b[..., None, :, :], **kwargs)[..., 0, :]

    numpy = ModuleType("numpy")
    vars(numpy).update(vars(np) | {"matmul": matmul})
    interpreter.np = numpy  # type: ignore[attr-defined]


def _prepare_once() -> None:
    """Triton prepares its language again at every call of a function by a kernel, though the kernel
    has found it prepared; once for each function is enough."""
    from triton.runtime.interpreter import InterpretedFunction

    plain, known = InterpretedFunction.__call__, set[Any]()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn)
        return plain(self, *args, **kwargs)

    InterpretedFunction.__call__ = call


def _look_for_no_overflow() -> None:
    """A dozen operations look whether a sum of integers fits, and nobody hears of what they find
    unless a kernel is debugged."""
    from triton.language.semantic import TritonSemantic

    plain = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self: Any, *arguments: Any) -> None:
        if self.builder.options.debug:
            plain(self, *arguments)

    TritonSemantic.binary_op_sanitize_overflow_impl = check


def _remember_types() -> None:
    """A type of blocks is worked out once, and so are the fields of a tensor that follow from it.
    Blocks of one shape need not be looked at to be brought to one shape."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    made, shapes = dict[Any, dict[str, Any]](), dict[Any, Any]()
    plain, broadcast = core.block_type.__init__, TritonSemantic.broadcast_impl_value

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if (key := (element_ty.name, sizes)) not in made:
            plain(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    def together(self: Any, lhs: Any, rhs: Any) -> Any:
        one, other = (getattr(value.type, "shape", None) for value in (lhs, rhs))
        return (lhs, rhs) if one is other else broadcast(self, lhs, rhs)

    fields, whole = dict[str, dict[str, Any]](), core.tensor.__init__

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if (name := type.name) not in fields:
            whole(self, handle, type)
            fields[name] = dict(vars(self))
        vars(self).update(fields[name])
        self.handle, self.type = handle, type

    stored, of_numpy = dict[str, Any](), interpreter._get_np_dtype

    def stored_as(type: Any) -> Any:
        if (name := type.name) not in stored:
            stored[name] = of_numpy(type)
        return stored[name]

    core.block_type.__init__, core.tensor.__init__ = block, tensor
    TritonSemantic.broadcast_impl_value = together
    interpreter._get_np_dtype = stored_as

"""What a machine without a GPU says; a process of its own, since the answer is kept."""

from __future__ import annotations

from engine.kernels import triton

if __name__ == "__main__":
    assert not triton.available() and triton.unavailable_reason()
    try:
        from engine.kernels.triton import ops
    except triton.TritonUnavailable as error:
        print(error)
    else:
        raise AssertionError(ops)

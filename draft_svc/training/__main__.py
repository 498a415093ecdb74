"""`python -m draft_svc.training`."""

from __future__ import annotations

import os

# Batches differ in shape: segments that grow keep the allocator from fragmenting.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from draft_svc.training.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

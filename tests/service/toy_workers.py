"""A toy target and a perfect draft as a process of their own: `python -m ... FOLDER`.

Says "up" on stdout when both serve at FOLDER/t and FOLDER/d, and a target with such a draft inside
at FOLDER/tc; ends when its stdin does.
"""

from __future__ import annotations

import asyncio
import sys

from target_svc.app import Loaded, TargetApp
from target_svc.settings import TargetSettings
from tests.service.colocated_toy import ColocatedToy
from tests.service.coordinator_harness import ScriptedDraft, document
from tests.service.toy_engine import ToyEngine


async def serve(folder: str) -> None:
    engine = ToyEngine(pages=8192, max_length=4096)
    settings = TargetSettings(address=f"unix:{folder}/t", drain_ms=0, reflection=False)
    app = TargetApp(settings, lambda _: Loaded(engine, document()))
    await app.start()
    draft = ScriptedDraft()
    await draft.start(f"unix:{folder}/d")
    colocated = ColocatedToy()
    colocated.address = f"unix:{folder}/tc"
    await colocated.start()
    print("up", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await colocated.stop()
    await draft.stop()
    await app.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))

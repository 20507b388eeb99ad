"""The end of a chaos run. An owner whose clocks are ahead by the grace sweeps and repairs, nothing else; then
`fsck --repair` and `fsck --deep`: nothing may be found, no slot may be live that no readable block accounts for."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Final

from efs.limits import HOLLOW_GRACE_MS
from tools.chaosrig import damage
from tools.chaosrig.owner import Options
from tools.chaosrig.processes import ObedientProcess, ProcessLost, kvstore
from tools.chaosrig.smallstore import UNEVICTABLE_BLOCKS

SHIFT_S: Final = HOLLOW_GRACE_MS / 1000 + 60.0


async def judge_end(root: str, journal: str, seed: int, incarnation: int, log: str,
                    close: Callable[[ObedientProcess], Awaitable[None]], violations: list[str]) -> dict[str, Any]:
    """What was found in a store that nobody owns; what is wrong with it goes into `violations`. close: ends an owner,
    and judges how it ends. ProcessLost when the store cannot be opened."""
    options = Options(root, journal, seed, incarnation, UNEVICTABLE_BLOCKS, SHIFT_S, working=False, damaged=0)
    owner = await ObedientProcess.start("tools.chaosrig.owner", asdict(options), log)
    if owner.refused is not None:
        raise ProcessLost(f"it was refused: {owner.refused}")
    try:
        swept = await owner.command("sweep")
        repaired = await owner.command("repair")
        swept_again = await owner.command("sweep")
        look = await owner.command("look")
        nodes = (await owner.command("nodes"))["nodes"]
        await close(owner)
    finally:
        await owner.kill()
    if look != {"lacking": []}:
        violations.append(f"blocks without twelve sound shards after the last repair: {look}")
    mended = await kvstore(root, "fsck", "--repair", "--yes")
    if mended.code not in (0, 1):
        violations.append(f"fsck --repair ended with {mended.code}: {mended.error[-300:]}")
    deep = await kvstore(root, "fsck", "--deep")
    if deep.code != 0:
        violations.append(f"fsck --deep ended with {deep.code}: {deep.document.get('findings')} {deep.error}")
    status = await kvstore(root, "status")
    if status.code != 0 or "get_calls" not in json.dumps(status.document):
        violations.append(f"status ended with {status.code}, or shows no counters: {status.error}")
    return {"sweep": swept, "repair": repaired, "second_sweep": swept_again, "nodes": nodes,
            "mended": mended.document.get("mended"), "found_by_repair": mended.document.get("findings", []),
            "counters": damage.raised({}, damage.counters(root)), "sums": deep.document.get("sums", {})}

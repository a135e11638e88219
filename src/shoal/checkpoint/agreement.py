"""All ranks agree on one checkpoint before any of them loads: the first rank chooses, and tells the others its manifest too.

If each chose, or somebody replaced it meanwhile, ranks would be set to work on different weights.
"""

from pathlib import Path

import torch

from shoal.checkpoint.files import parse_step, step_name
from shoal.checkpoint.whole import hash_manifest
from shoal.comm.world import World
from shoal.core.errors import ShoalError

_WORDS = 8
"""Of 32 bits: a SHA-256."""


def agree_on_checkpoint(world: World, root: Path, chosen: Path | None) -> tuple[Path | None, str]:
    """What the first rank chose, and the hash of its manifest; None where there is no checkpoint. All ranks call it together.

    Args:
        world: the ranks.
        root: the folder of checkpoints.
        chosen: the first rank's choice; the others give None.
    """
    told = torch.zeros(1 + _WORDS, dtype=torch.int64, device=world.device)
    if chosen is not None:
        told[0] = 1 + (parse_step(chosen.name) or 0)
        try:
            digest = bytes.fromhex(hash_manifest(chosen))
        except ShoalError:
            digest = bytes(4 * _WORDS)  # It went away a moment ago: nobody will find this one.
        told[1:] = torch.tensor([int.from_bytes(digest[4 * word :][:4]) for word in range(_WORDS)])
    step, *words = world.all_reduce_(told).tolist()
    if step == 0:
        return None, ""
    return root / step_name(step - 1), b"".join(word.to_bytes(4) for word in words).hex()


def agree_on_failure(world: World, problem: str, *, where: Path | str) -> str:
    """What to say on this rank when any rank has a problem; empty where none has. All ranks call it together."""
    failures = int(world.all_reduce_(torch.tensor([int(bool(problem))], device=world.device)))
    return "" if not failures else problem or f"{failures} other rank(s) cannot go on from {where}"

"""A processor that announces tiles and hides their shape: what torch's kernels must not use, said before they are first used.

Some virtual machines show the flag of AMX and cut off the pages of CPUID that say how large a tile is. oneDNN, which torch
computes bfloat16 products with, believes the flag, sets up tiles of no size, and the first product ends the process with SIGILL.
oneDNN can be told by its environment only, which it reads at its first product and which processes that are started inherit.
"""

from collections.abc import MutableMapping

VARIABLE = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX512_CORE_FP16"
"""Everything below AMX. What is computed in 32 and 64 bits never uses tiles: no bit of it changes."""
_TILE_PAGE = 0x1D
"""The CPUID leaf with the shape of tiles: Intel's Software Developer's Manual, volume 2, CPUID."""
_FIRST_PROCESSOR_BYTES = 8192
"""Of the list of all processors, which is long where there are many; they are alike."""


def hides_tiles(cpuinfo: str) -> bool:
    """True when the first processor of ``/proc/cpuinfo`` announces tiles, and its CPUID ends before the page of their shape."""
    fields = {name.strip(): value.strip() for name, _, value in map(_split, cpuinfo.split("\n\n")[0].splitlines())}
    level = fields.get("cpuid level", "")
    return "amx_tile" in fields.get("flags", "").split() and level.isdigit() and int(level) < _TILE_PAGE


def avoid_hidden_tiles(environment: MutableMapping[str, str], cpuinfo: str = "/proc/cpuinfo") -> bool:
    """Keep oneDNN from tiles whose shape is hidden; True where that is so. What the user has set there stays."""
    try:
        with open(cpuinfo, errors="replace") as file:
            is_hidden = hides_tiles(file.read(_FIRST_PROCESSOR_BYTES))
    except OSError:
        return False
    if is_hidden:
        environment.setdefault(VARIABLE, WITHOUT_TILES)
    return is_hidden


def _split(line: str) -> tuple[str, str, str]:
    return line.partition(":")

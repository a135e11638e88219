"""The fragments of ``stream`` as the oracle cuts them: by a pattern over names, and no code of ``replicas/``."""

import re
from collections.abc import Sequence

_NUMBERED = re.compile(r"(?P<stem>.*?)(?P<number>\b\d+)\.")


def fragments_of(names: Sequence[str], count: int) -> list[list[str]]:
    """Douillard et al. 2025, strided: of the layers one after the other the first goes to the first fragment, the next to the
    next, and round again. Layers without a number come behind those that have one."""
    numbered: dict[tuple[str, int], list[str]] = {}
    plain: dict[str, list[str]] = {}
    for name in names:
        if found := _NUMBERED.match(name):
            numbered.setdefault((found["stem"], int(found["number"])), []).append(name)
        else:
            plain.setdefault(name.rpartition(".")[0] or name, []).append(name)
    layers = [numbered[key] for key in sorted(numbered)] + [plain[key] for key in sorted(plain)]
    fragments: list[list[str]] = [[] for _ in range(count)]
    for turn, layer in enumerate(layers):
        fragments[turn % count].extend(layer)
    return [sorted(one) for one in fragments]

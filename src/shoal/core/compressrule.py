"""The plan's ``compress`` as one value that prints and parses as one word: a codec, its number, and the step it starts at. No
torch.

``int8``, ``int4:64``, ``topk:0.01``, ``powersgd:4@30``: what follows the colon is a block, a ratio, a threshold, a rank or a
number of bits, by the codec; what follows the @ is the first step that is compressed.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast, get_args

from shoal.core.errors import RequestError, did_you_mean, nearest

CompressKind = Literal[
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "topk",
    "randk",
    "threshold",
    "dgc",
    "sign",
    "onebit",
    "powersgd",
    "qsgd",
    "natural",
]
_RATIOS = ("topk", "randk", "dgc")
_BLOCKS = ("int8", "int4")
_EXAMPLES = {
    "topk": "topk:0.01",
    "randk": "randk:0.01",
    "dgc": "dgc:0.001",
    "threshold": "threshold:0.001",
    "powersgd": "powersgd:4",
    "qsgd": "qsgd:4",
}
_OTHER_NAMES: dict[str, CompressKind] = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "8bit": "int8",
    "4bit": "int4",
    "signsgd": "sign",
}
"""What codecs are called elsewhere, and look like others here."""
COSTLY = ("topk", "threshold", "dgc", "sign")
"""Under optimizers that divide by a moment of the gradient these lose as much as the other replicas bring."""
QSGD_BITS = (2, 4, 8)
LEAST_BLOCK = 8


@dataclass(frozen=True, kw_only=True)
class CompressRule:
    """Which codec, with which number, from which step on."""

    kind: CompressKind
    number: float = 0.0
    """The ratio of top-k, random-k and DGC, the threshold, the rank of PowerSGD or the bits of QSGD; 0 for the others."""
    block: int | None = None
    """Elements that share a scale, for int8 and int4; None: the default."""
    start: int = 0
    """The first step that is compressed."""

    @classmethod
    def parse(cls, text: str) -> "CompressRule":
        """The rule that a word of the plan says.

        Raises:
            RequestError: the codec is unknown, or its number is missing, not wanted or out of range.
        """
        body, at, start_text = text.partition("@")
        name, colon, given = body.partition(":")
        if name not in get_args(CompressKind):
            known = _OTHER_NAMES.get(name)
            near = f"did you mean {known!r}?" if known else did_you_mean(name, [*get_args(CompressKind), "none"])
            raise RequestError(f"compress {text!r}: unknown codec {name!r}; {near}")
        kind = cast(CompressKind, name)
        start = _whole(text, "the first compressed step", start_text, 0) if at else 0
        if kind in _BLOCKS:
            block = _whole(text, "the block", given, LEAST_BLOCK) if colon else None
            return cls(kind=kind, block=block, start=start)
        if kind not in _EXAMPLES:
            if colon:
                raise RequestError(f"compress {text!r}: {kind} takes no number; write {kind}")
            return cls(kind=kind, start=start)
        if not given:
            raise RequestError(f"compress {text!r}: {kind} takes 1 number, not 0; write {_EXAMPLES[kind]}")
        return cls(kind=kind, number=_number(text, kind, given), start=start)

    def __str__(self) -> str:
        number = self.block if self.kind in _BLOCKS else (self.number if self.kind in _EXAMPLES else None)
        word = self.kind if number is None else f"{self.kind}:{repr(number).removesuffix('.0')}"
        return f"{word}@{self.start}" if self.start else word


def near_codec(text: str) -> str | None:
    """The codec that a word which is none was meant to be, in the plan's words; None where none is near, and for one that is."""
    name = text.partition("@")[0].partition(":")[0]
    kinds = get_args(CompressKind)
    kind = name if name in kinds else _OTHER_NAMES.get(name) or nearest(name, kinds)
    if kind is None:
        return None
    meant = kind + text.removeprefix(name)
    for word in (meant, _EXAMPLES.get(kind, kind)):
        try:
            CompressRule.parse(word)
        except RequestError:
            continue
        return None if word == text else word
    return None


def _number(text: str, kind: str, given: str) -> float:
    if kind == "powersgd":
        return float(_whole(text, "the rank", given, 1))
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    example = _EXAMPLES[kind]
    if kind == "qsgd" and number not in QSGD_BITS:
        raise RequestError(f"compress {text!r}: the bits are {given!r}, and must be 2, 4 or 8, such as {example}")
    if kind in _RATIOS and not 0 < number <= 1:
        raise RequestError(
            f"compress {text!r}: the ratio is {given!r}, and must be above 0 and at most 1, such as {example}"
        )
    if kind == "threshold" and not 0 < number < math.inf:
        raise RequestError(f"compress {text!r}: the threshold is {given!r}, and must be above 0, such as {example}")
    return number


def _whole(text: str, what: str, value: str, low: int) -> int:
    number = int(value) if value.isascii() and value.isdigit() else None
    if number is None or number < low:
        raise RequestError(f"compress {text!r}: {what} is {value!r}, and must be a whole number of {low} or more")
    return number

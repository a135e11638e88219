"""Requests to train that are wrong in many ways: recipes, overrides and plans, changed at random from ones that are right."""

import random
import string
from dataclasses import dataclass
from typing import Any

import tomlkit

RIGHT: list[dict[str, Any]] = [
    {
        "plan": "dp=1",
        "model": {"name": "gpt", "layers": 2, "hidden": 16, "heads": 2, "dropout": 0.1},
        "data": {"source": "synthetic", "kind": "tokens", "samples": 64, "sequence": 8, "vocab": 33},
        "train": {"steps": 4, "global_batch": 8, "seed": 3, "precision": "float32", "time_limit": "10m"},
        "optim": {"name": "adamw", "lr": 1e-3, "clip": 0.5, "schedule": "cosine"},
        "eval": {"samples": 8, "every": 2},
        "checkpoint": {"every": 2, "keep": 2},
        "telemetry": {"tensorboard": False},
        "elastic": {"heartbeat_deadline": 10.0, "max_restarts": 1},
        "pipeline": {"balance": "estimated"},
        "parallel": {},
    },
    {
        "plan": "ps=1 workers=2 update=bsp",
        "model": {"name": "mlp", "layers": 2, "hidden": 8},
        "data": {"source": "synthetic", "kind": "classes", "samples": 64, "features": [8], "classes": 4},
        "train": {"epochs": 1.0, "global_batch": 8, "threads": 1},
        "optim": {"name": "momentum", "lr": 0.1, "momentum": 0.9},
        "paramserver": {"dead_seconds": 20.0, "hang_after": 10.0, "overlap": False},
        "planner": {},
    },
]
PLANS = (
    "dp=2 zero=3",
    "pp=2 microbatches=2 schedule=1f1b",
    "tp=2 sp=true",
    "ps=1 workers=2 update=ssp:2 backup=0",
    "cp=2",
)
VALUES: list[Any] = [
    0, 1, -1, 2**31, 2**63, -(2**70), 10**400, 0.0, -0.5, 1e308, float("inf"), float("-inf"), float("nan"), True, False, "", "x",
    "x" * 5000, "ä漢\u202e💥", "a\x00b", "'", '"', "\\", "../../etc/passwd", "/", "canary:build", "canary", "none", "null", "1",
    "1e9", "10m", "-3s", [], [1], [[]], ["a"], [1, "a"], {}, {"x": 1}, {"loss": "canary:build"}, {"a": {"b": {"c": [{}]}}},
    "[" * 200, "{" * 200, "gpt", "adamw", "synthetic", "dp=2",
]  # fmt: skip
LETTERS = string.ascii_lowercase + "_"


@dataclass(frozen=True, kw_only=True)
class Wild:
    """A request, and what is known of it."""

    data: bytes
    """Of the recipe."""
    overrides: tuple[str, ...] = ()
    plan: str | None = None
    num_processes: int | None = None
    path: str = ""
    """The key that was changed; empty where it is not one."""
    meant: str = ""
    """What a name was before one letter of it was changed."""


class Dice:
    """Draws requests, the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def draw(self) -> Wild:
        kinds = (
            self.typo,
            self.typo,
            self.typo,
            self.value,
            self.value,
            self.value,
            self.override,
            self.plan,
            self.bytes_,
        )
        return self.random.choice(kinds)()

    def typo(self) -> Wild:
        """One letter of a section's or a key's name is wrong, in the file or in an override."""
        tables = self.tables()
        section, key = self.place(tables)
        inside = self.random.random() < 0.8
        name = key if inside and key else section
        wrong = self.misspelt(name)
        path = f"{section}.{wrong}" if name is key else wrong
        if name is key and self.random.random() < 0.3:
            return Wild(
                data=write(tables).encode(),
                overrides=(f"{path}={write_value(tables[section][key])}",),
                path=path,
                meant=name,
            )
        table = tables[section] if name is key else tables
        table[wrong] = table.pop(name)
        return Wild(data=write(tables).encode(), path=path, meant=name)

    def value(self) -> Wild:
        """A value that is of another kind, too large, or strange."""
        tables = self.tables()
        section, key = self.place(tables)
        value = self.random.choice(VALUES)
        if not key:
            tables[section] = value
        else:
            tables[section][key] = value
        return Wild(data=write(tables).encode(), path=f"{section}.{key}".rstrip("."))

    def override(self) -> Wild:
        """Words after ``--set`` that are strange, and a number of processes."""
        tables = self.tables()
        section, key = self.place(tables)
        value = self.random.choice(VALUES)
        texts = [
            f"{section}.{key}={value}",
            f"{section}.{key}={write_value(value)}",
            f"{section}.{key}.{key}={value}",
            f"{section}={value}",
            f"{value}={value}",
            f"{section}.{key}",
            f".{key}=1",
            "=",
            f"{section}..{key}=1",
        ]
        processes = self.random.choice([None, None, 1, 2, 3, 10**6])
        overrides = tuple(self.random.sample(texts, self.random.choice([1, 1, 2])))
        return Wild(data=write(tables).encode(), overrides=overrides, num_processes=processes)

    def plan(self) -> Wild:
        """A plan with letters changed, words doubled, values out of range."""
        words = self.random.choice(PLANS).split()
        word = self.random.randrange(len(words))
        name, _, value = words[word].partition("=")
        words[word] = self.random.choice(
            [
                f"{self.misspelt(name)}={value}",
                f"{name}={self.random.choice(VALUES)}",
                f"{name}={value}={value}",
                f"{name} = {value}",
                f"{name}",
                f"{name}={value} {name}={value}",
                f"{name}={value}{self.random.choice(LETTERS)}",
            ]
        )
        return Wild(data=write(self.tables()).encode(), plan=" ".join(words))

    def bytes_(self) -> Wild:
        """Some bytes of the file are others, gone or doubled."""
        data = bytearray(write(self.tables()).encode())
        for _ in range(self.random.choice([1, 1, 3, 20])):
            at = self.random.randrange(len(data))
            data[at : at + self.random.choice([0, 1, 1, 7])] = self.random.choice(
                [
                    bytes([self.random.randrange(256)]),
                    b"",
                    b"\n[",
                    b"]]",
                    b"=",
                    b'"""',
                    b"\xff\xfe",
                    b"\x00",
                    data[at : at + 9],
                ]
            )
        return Wild(data=bytes(data))

    def tables(self) -> dict[str, Any]:
        found = self.random.choice(RIGHT)
        return {name: dict(value) if isinstance(value, dict) else value for name, value in found.items()}

    def place(self, tables: dict[str, Any]) -> tuple[str, str]:
        """A section and one of its keys; no key where the section has none, or is a value itself."""
        section = self.random.choice(list(tables))
        keys = list(tables[section]) if isinstance(tables[section], dict) else []
        return section, self.random.choice(keys) if keys else ""

    def misspelt(self, name: str) -> str:
        """One edit away: a letter left out, put in, changed, or two turned round."""
        at = self.random.randrange(len(name))
        letter = self.random.choice(LETTERS)
        wrong = self.random.choice(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at : at + 2][::-1] + name[at + 2 :],
            ]
        )
        return wrong if wrong and wrong != name else name + "x"


def write(tables: dict[str, Any]) -> str:
    return tomlkit.dumps(tables)


def write_value(value: Any) -> str:
    return tomlkit.item(value).as_string()

"""A picture of a run as a drawing for a terminal, and as plain lines for everything else. All text of files is shown as it is."""

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shoal.core.units import format_bytes, format_count, format_duration
from shoal.dashboard.terminal.picture import MARKS, Picture, RankLine, most_important

_STYLES = {"hanging": "bold red", "died": "bold red", "silent": "bold yellow", "ended": "dim", "running": "green"}
_STATUS_STYLES = {"failed": "bold red", "silent": "bold yellow", "running": "bold green"}


def plain(text: str) -> str:
    """Text of a file without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def seconds(value: float | None) -> str:
    """A time in few letters; empty for none."""
    if value is None:
        return ""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def age(value: float) -> str:
    """How long ago something was, in few letters."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if value >= 2 * length:
            return f"{value / length:.0f} {unit}"
    return f"{max(value, 0.0):.0f} s"


def numbers(picture: Picture) -> dict[str, str]:
    """The run's numbers, by name, without those that nobody knows."""
    found = {
        "loss": None if picture.loss is None else f"{picture.loss:.4f}",
        "validation": None if picture.validation_loss is None else f"{picture.validation_loss:.4f}",
        "tokens/s": None if picture.tokens_per_s is None else format_count(picture.tokens_per_s),
        "left": None if picture.eta_s is None or picture.is_over else format_duration(picture.eta_s),
    }
    return {name: text for name, text in found.items() if text is not None}


def columns(ranks: list[RankLine]) -> list[str]:
    """Those that some rank has a value for."""
    waits = dict.fromkeys(axis for line in ranks for axis in line.waits)
    return [
        "rank",
        *(["host"] if len({line.host for line in ranks if line.host}) else []),
        "state",
        "step",
        *(["phase", "for"] if any(line.phase for line in ranks) else []),
        "step time",
        "busy",
        *(f"wait {axis}" for axis in waits),
        "memory",
        *(["heartbeat"] if any(line.heartbeat_age is not None for line in ranks) else []),
    ]


def cells(line: RankLine) -> dict[str, str]:
    """A rank's cells, by column."""
    return {
        "rank": plain(line.name.removeprefix("rank ")),
        "host": plain(line.host),
        "state": plain(line.state).upper() if line.state in MARKS else plain(line.state),
        "step": "" if line.step is None else str(line.step),
        "phase": plain(line.phase),
        "for": seconds(line.phase_seconds),
        "step time": seconds(line.step_seconds),
        "busy": seconds(line.busy_seconds),
        "memory": "" if line.memory_bytes is None else format_bytes(line.memory_bytes),
        "heartbeat": "" if line.heartbeat_age is None else f"{seconds(line.heartbeat_age)} ago",
        **{f"wait {axis}": seconds(value) for axis, value in line.waits.items()},
    }


def draw(picture: Picture, *, width: int = 120, height: int = 40) -> RenderableType:
    """The drawing, in so many lines at most; columns that there is no room for are left out, the least telling first."""
    head = Table.grid(padding=(0, 2))
    bar = (
        ProgressBar(total=picture.total_steps, completed=min(picture.step, picture.total_steps), width=30)
        if picture.step is not None and picture.total_steps
        else Text("")
    )
    head.add_row(
        Text(plain(picture.name), style="bold"),
        Text(picture.status, style=_STATUS_STYLES.get(picture.status, "")),
        Text(_steps(picture)),
        bar,
    )
    line = Text(plain(picture.plan), no_wrap=True, overflow="ellipsis", style="cyan")
    for name, text in numbers(picture).items():
        line.append(f"   {name} ", style="dim").append(text)
    parts: list[RenderableType] = [head, line]
    parts += [Text(f"! {plain(warning)}", style="bold red", overflow="fold") for warning in picture.warnings[:5]]
    story = picture.story[-max(0, min(5, height // 4)) :]
    shown = most_important(picture.ranks, max(3, height - len(parts) - len(story) - 4))
    if shown:
        parts += [Text(""), _table(shown, width)]
    if len(shown) < len(picture.ranks):
        parts.append(
            Text(f"{len(picture.ranks) - len(shown)} more; shown are those with a mark and the busiest", style="dim")
        )
    if story:
        parts += [Text("")]
        parts += [Text(plain(text), style="dim", no_wrap=True, overflow="ellipsis") for text in story]
    return Group(*parts)


def _steps(picture: Picture) -> str:
    step = "?" if picture.step is None else str(picture.step)
    return f"step {step}/{picture.total_steps}" if picture.total_steps else f"step {step}"


_LEFT_OUT = ("heartbeat", "wait data", "host", "memory", "busy", "for")
"""Columns that a narrow terminal does without, in this order."""


def _fitting(ranks: list[RankLine], width: int) -> list[str]:
    names, rows = columns(ranks), [cells(line) for line in ranks]
    needed = {name: 2 + max(len(name), *(len(row.get(name, "")) for row in rows)) for name in names}
    # A phase may be long, and says what it is about by how it begins.
    needed["phase"] = min(needed.get("phase", 0), 22)
    for name in _LEFT_OUT:
        if sum(needed[one] for one in names) > width + 2:
            names = [one for one in names if one != name]
    return names


def _table(ranks: list[RankLine], width: int) -> Table:
    names = _fitting(ranks, width)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in names:
        is_text = name in ("host", "state", "phase")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=True, overflow="ellipsis")
    for line in ranks:
        found = cells(line)
        style = _STYLES.get(line.state, "") if line.state in MARKS else ""
        table.add_row(*(Text(found.get(name, "")) for name in names), style=style)
    return table


def plain_lines(picture: Picture) -> list[str]:
    """The picture as lines of ``key=value``, one for the run and one for each rank."""
    about = {"run": picture.name, "status": picture.status, "plan": picture.plan, "step": _steps(picture)[5:]}
    found = [_line({**about, **numbers(picture)})]
    found += [f"warning: {plain(warning)}" for warning in picture.warnings]
    for line in picture.ranks:
        found.append("  " + _line({name: text for name, text in cells(line).items() if text}))
    return found


def _line(values: dict[str, str]) -> str:
    def word(text: str) -> str:
        clean = plain(text)
        return f'"{clean}"' if " " in clean else clean

    return " ".join(f"{name.replace(' ', '_')}={word(text)}" for name, text in values.items())

"""Schedules as CSV: ours are read by torch, torch's by us, and what is wrong is refused by row and cell."""

import csv
import io
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs
from torch.distributed.pipelining.stage import _PipelineStageBase

from shoal.core.errors import RequestError
from shoal.schedules.catalogue import FAMILIES, make_schedule
from shoal.schedules.csv_file import read_csv, write_csv
from shoal.schedules.schedule import Fold, Schedule, write_cell

ONE_F_ONE_B = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def read(text: str) -> Schedule:
    return read_csv(text, name="mine", origin="mine.csv")


def build_torchs(name: str, ranks: int, chunks: int, microbatches: int):
    """A schedule of torch's own; its stages are needed for their numbers only."""
    stages = [
        MagicMock(
            spec=_PipelineStageBase,
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * chunks,
            stage_index=chunk * ranks,
            submod=None,
        )
        for chunk in range(chunks)
    ]
    return torchs.get_schedule_class(name)(stages, microbatches)


def cells_of(order) -> list[list[str]]:
    """Torch's rows as text, without idle slots."""
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]


TORCHS = [
    ("Interleaved1F1B", 4, 2, 8, Fold.LOOP),
    ("Interleaved1F1B", 2, 3, 4, Fold.LOOP),
    ("LoopedBFS", 2, 2, 4, Fold.LOOP),
    ("InterleavedZeroBubble", 4, 2, 8, Fold.LOOP),
    ("ZBVZeroBubble", 4, 2, 8, Fold.VEE),
    ("DualPipeV", 4, 2, 10, Fold.VEE),
]


@pytest.mark.parametrize(("name", "ranks", "chunks", "microbatches", "fold"), TORCHS)
def test_what_torch_writes_is_read_and_what_we_write_of_it_torch_reads_back(
    tmp_path, name, ranks, chunks, microbatches, fold
):
    theirs = build_torchs(name, ranks, chunks, microbatches)
    theirs._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    schedule = read((tmp_path / "theirs.csv").read_text())
    grid = schedule.grid
    assert (grid.fold, grid.num_ranks, grid.num_stages, grid.num_microbatches) == (
        fold,
        ranks,
        ranks * chunks,
        microbatches,
    )
    wanted = cells_of(theirs.pipeline_order)
    assert [[write_cell(cell) for cell in row] for row in schedule.rows] == wanted
    (tmp_path / "ours.csv").write_text(write_csv(schedule))
    again = build_torchs(name, ranks, chunks, microbatches)
    again.pipeline_order = {}
    # Torch checks the schedule and adds its communication.
    again._load_csv(tmp_path / "ours.csv", format="compute_only")
    assert cells_of(again.pipeline_order) == wanted


def test_torchs_files_have_idle_slots():
    """The test above would prove little about them otherwise."""
    order = build_torchs("ZBVZeroBubble", 4, 2, 8).pipeline_order
    assert any(action is None for row in order.values() for action in row)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_torch_reads_the_cells_of_every_family_and_finds_one_stage_on_one_rank(family):
    ours = make_schedule(family.name, ranks=4, microbatches=8)
    lines = list(csv.reader(io.StringIO(write_csv(ours))))
    actions = {rank: [torchs._Action.from_str(text) for text in line] for rank, line in enumerate(lines)}
    assert cells_of(actions) == [[write_cell(cell) for cell in row] for row in ours.rows]
    if family.fold is Fold.CROSS:
        # Torch has no place for two copies of the model; it says so.
        with pytest.raises(AssertionError, match="assigned to both"):
            torchs._validate_schedule(actions, 4, ours.grid.num_stages, 8)
    else:
        places = torchs._validate_schedule(actions, 4, ours.grid.num_stages, 8)
        assert places == {stage: ours.grid.rank_of(stage, 0) for stage in range(ours.grid.num_stages)}


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(list(FAMILIES)),
    ranks=st.integers(1, 5),
    microbatches=st.integers(1, 10),
    chunks=st.integers(1, 3),
)
def test_what_is_written_is_read_back(name, ranks, microbatches, chunks):
    try:
        chosen = chunks if FAMILIES[name].chunks is None else None
        ours = make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chosen)
    except RequestError:
        return
    back = read(write_csv(ours))
    assert back.rows == ours.rows
    assert back.name == "mine"
    everything = [(stage, each) for stage in range(ours.grid.num_stages) for each in range(microbatches)]
    assert [back.grid.rank_of(*pair) for pair in everything] == [ours.grid.rank_of(*pair) for pair in everything]


@pytest.mark.parametrize(
    ("name", "fold"), [("1f1b", "line"), ("interleaved", "loop"), ("zbv", "vee"), ("chimera", "cross")]
)
def test_the_fold_is_read_off_the_forwards(name, fold):
    assert read(write_csv(make_schedule(name, ranks=4, microbatches=8))).grid.fold == fold


@pytest.mark.parametrize(
    "text",
    [
        ONE_F_ONE_B.replace("\n", "\r\n"),
        "\ufeff" + ONE_F_ONE_B,
        ONE_F_ONE_B + "\n\n",
        ONE_F_ONE_B.replace(",", " , "),
        "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,,,\n",
        '"0F0","0F1","0B0","0B1"\n1F0,1B0,1F1,1B1',
    ],
    ids=["dos", "byte order mark", "empty lines at the end", "spaces", "idle slots, rows of unlike length", "quotes"],
)
def test_what_editors_make_of_a_file_is_read_all_the_same(text):
    assert write_csv(read(text)) == ONE_F_ONE_B


@pytest.mark.parametrize(
    ("text", "words"),
    {
        "empty": ("", ["mine.csv has no cells", "0F0,0B0"]),
        "commas only": (",,,\n,,\n", ["mine.csv has no cells"]),
        "no action": ("0F0,0X0,0B0\n", ["mine.csv, row 1 (rank 0), cell 2: '0X0' is no action", "2F0"]),
        "no microbatch": ("0F0,0B0\n1F0,1B\n", ["mine.csv, row 2 (rank 1), cell 2: '1B' is no action"]),
        "other separator": ("0F0;0B0\n", ["row 1 (rank 0), cell 1: '0F0;0B0' is no action"]),
        "negative": ("-1F0,0B0\n", ["row 1 (rank 0), cell 1: '-1F0' is no action"]),
        "a number without end": (f"{'9' * 5000}F0\n", ["row 1 (rank 0), cell 1", "is 5002 letters long"]),
        "communication": (
            "0F0,0SEND_F0,0B0\n",
            ["row 1 (rank 0), cell 2", "'0SEND_F0' is communication", "compute_only"],
        ),
        "wrong overlap": (
            "0F0,(0B0;0F1)OVERLAP_F_B,0B1\n",
            ["row 1 (rank 0), cell 2", "overlaps 0B0 and 0F1", "a forward first"],
        ),
        "open quote": ('0F0,"0B0\n', ["mine.csv is no CSV"]),
        "a rank without work": ("0F0,0B0\n\n1F0,1B0\n", ["row 2 has no action", "rank 1 has no work"]),
        "microbatch left out": (
            "0F0,0F2,0B0,0B2\n",
            ["row 1 (rank 0), cell 2: 0F2 is of microbatch 2, and no cell is of microbatch 1", "without a gap"],
        ),
        "stage left out": (
            "0F0,0B0\n2F0,2B0\n",
            ["row 2 (rank 1), cell 1: 2F0 is of stage 2, and no cell is of stage 1", "without a gap"],
        ),
        "a billion stages": ("999999999F0\n", ["row 1 (rank 0), cell 1: 999999999F0", "no cell is of stage 0"]),
        "stages that cannot be dealt": (
            "0F0,2F0,2B0,0B0\n1F0,1B0\n",
            ["row 1 (rank 0), cell 2: there are 3 stages and 2 rows", "evenly"],
        ),
        "ranks in another order": (
            "1F0,1B0\n0F0,0B0\n",
            [
                "row 1 (rank 0), cell 1: 1F0 does not lie there",
                "the nearest has it in row 2 (rank 1)",
                "line:",
                "cross:",
            ],
        ),
        "one forward astray": (
            "0F0,0F1,1F1,1B1,0B0,0B1\n1F0,1B0\n",
            ["row 1 (rank 0), cell 3: 1F1 does not lie there", "row 2 (rank 1)"],
        ),
        "one forward astray among many": (
            "0F0,0F1,0F2,0F3,1F3,1B3,0B0,0B1,0B2,0B3\n1F0,1F1,1F2,1B0,1B1,1B2\n",
            ["row 1 (rank 0), cell 5: 1F3 does not lie there", "row 2 (rank 1)"],
        ),
        "a cross by odd and even": (
            "0F0,1F1,1B1,0B0,0F2,1F3,1B3,0B2\n1F0,0F1,1B0,0B1,1F2,0F3,1B2,0B3\n",
            ["row 1 (rank 0), cell 2: 1F1 does not lie there", "second"],
        ),
        "no fold of three": ("0F0,1F0,2F0,2B0,1B0,0B0\n3F0,4F0,5F0,5B0,4B0,3B0\n", ["cell 2: 1F0", "loop:"]),
        "backward missing": (
            "0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n",
            ["mine.csv: stage 0 has no B (or I) of microbatch 1", "^ here"],
        ),
        "rows of unlike length": (
            "0F0,0F1,0B0,0B1\n1F0,1B0\n",
            ["stage 1 has no F of microbatch 1; add it to the row of rank 1", "^ here"],
        ),
        "backward astray": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1,0B1\n", ["0B1 is in the row of rank 1", "move it", "^ here"]),
        "twice": ("0F0,0B0,0B0\n", ["0B0 does again", "^ here"]),
        "cycle": (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            ["never ends: rank 0 waits at 0B0 for 1B0 of rank 1", "^ here"],
        ),
    }.values(),
)
def test_what_is_wrong_is_refused_with_its_place_and_the_fix(text, words):
    with pytest.raises(RequestError) as caught:
        read(text)
    assert caught.value.exit_code == 2
    for word in words:
        assert word in str(caught.value)


def test_the_arrow_stands_under_the_cell_although_idle_slots_were_skipped():
    with pytest.raises(RequestError) as caught:
        read("0F0,,,0B0,0F1,0B1\n,1F0,1F1,1B0,1B1\n")
    lines = str(caught.value).splitlines()
    arrow = next(place for place, line in enumerate(lines) if line.endswith("^ here"))
    assert lines[arrow - 1][lines[arrow].index("^") :].startswith("0B0")


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="012FBIW,\n;()OVERLAP_ \"'x\ud7ff\x00", max_size=60))
def test_no_text_whatever_does_more_than_be_refused(text):
    try:
        read(text)
    except RequestError:
        pass

"""Mutations of tables: how rows are cut, fitted and read."""

from promises import Mutation

CUT = "no row of a table is on two sides"
FIT = "what is fitted on a table has the same bits"
HOSTILE = "a hostile table"

TABLES = [
    Mutation(
        promise=CUT,
        what="keys on two sides are certified",
        file="src/shoal/data/partition/certificate.py",
        old="    if split and not allowed_split:",
        new="    if split and allowed_split is None:",
        test="tests/unit/data/partition/test_cut.py::test_a_cut_that_leaks_is_not_certified",
        seconds=4,
    ),
    Mutation(
        promise=CUT,
        what="rows of the gap are trained on",
        file="src/shoal/data/partition/rules.py",
        old='placed[stop] - gap, side="left")',
        new='placed[stop] - 0 * gap, side="left")',
        test="tests/unit/data/partition/test_rules.py::test_rows_within_the_gap_are_left_out",
        seconds=4,
    ),
    Mutation(
        promise=FIT,
        what="blocks are merged as their workers are done with them",
        file="src/shoal/data/transform/blocks.py",
        old="                yield waiting.popleft().result()\n        while",
        new="                yield waiting.pop().result()\n        while",
        test="tests/unit/data/transform/test_blocks.py::test_groups_come_in_their_order_whenever_they_are_ready",
        seconds=4,
    ),
    Mutation(
        promise=FIT,
        what="steps are fitted on held-out rows",
        file="src/shoal/data/transform/pipeline.py",
        old="    if digest != train_digest:",
        new="    if not digest:",
        test="tests/unit/data/transform/test_pipeline.py::test_a_fit_on_held_out_rows_is_refused",
        seconds=6,
    ),
    Mutation(
        promise=HOSTILE,
        what="links in tar files are rows",
        file="src/shoal/data/formats/tarshards.py",
        old="if not member.isreg() or member.issparse():",
        new="if member.issparse():",
        test="tests/unit/data/formats/test_tarshards.py::test_what_is_no_row_is_refused",
        seconds=4,
    ),
    Mutation(
        promise=HOSTILE,
        what="a member of a tar file may lie above its folder",
        file="src/shoal/data/formats/tarshards.py",
        old='if name.startswith("/") or ".." in parts',
        new="if len(parts) < 1",
        test="tests/unit/data/formats/test_tarshards.py::test_what_is_no_row_is_refused",
        seconds=4,
    ),
]

"""Mutations of stores of data: rows of *Numerics*, *Failure* and *Trust*."""

from promises import Mutation

SAMPLES = "a run from a store of token ids has the samples of the token file"
FLIPS = "a flipped bit in any file of a store is found"
KILLS = "an append to a store that is killed at any system call"
HARM = "a store that was made to harm"

STORES = [
    Mutation(
        promise=SAMPLES,
        what="a sample over the end of a block leaves out the first id of the next",
        file="src/shoal/data/store/tokens.py",
        old="            number, at = number + 1, 0",
        new="            number, at = number + 1, 1",
        test="tests/unit/data/sources/test_storerows.py::test_every_sample_is_that_of_the_token_file",
        seconds=5,
    ),
    Mutation(
        promise=SAMPLES,
        what="a run that goes on takes the newest version",
        file="src/shoal/trainer/claim.py",
        old='        data = data.model_copy(update={"version": before.version})',
        new="        pass",
        test="tests/unit/trainer/test_claim_store.py::test_a_run_that_goes_on_reads_the_version_that_it_began_with",
        seconds=5,
    ),
    Mutation(
        promise=FLIPS,
        what="digests of blocks are not compared",
        file="src/shoal/data/store/folder.py",
        old="    if digest_block(data) != ref.digest:",
        new="    if False:",
        test="tests/chaos/test_store_flips.py::test_every_flip_is_found_and_named",
        seconds=10,
    ),
    Mutation(
        promise=FLIPS,
        what="a block that is deleted under a run is not missed",
        file="src/shoal/data/store/checks/watch.py",
        old="            if found == before:",
        new="            if found == before or found is None:",
        test="tests/unit/data/sources/test_storerows.py::test_a_block_that_goes_under_a_run_is_told_by_name",
        seconds=5,
    ),
    Mutation(
        promise=KILLS,
        what="the version is written over the one that another append made",
        file="src/shoal/data/store/writer.py",
        old="    folder.storage.create(folder.path(VERSIONS",
        new="    folder.storage.replace(folder.path(VERSIONS",
        test="tests/unit/data/store/test_writer.py::test_many_appenders_at_once_lose_nothing",
        seconds=5,
    ),
    Mutation(
        promise=KILLS,
        what="an append that is tried again does not see that its rows are there",
        file="src/shoal/data/store/writer.py",
        old="    if now == dict(offsets):",
        new="    if False:",
        test="tests/unit/data/store/test_writer.py::test_what_was_taken_in_is_not_taken_in_again",
        seconds=5,
    ),
    Mutation(
        promise=HARM,
        what="the length of a payload is not compared with what its columns take",
        file="src/shoal/data/store/block.py",
        old="    if raw != expected or (codec == 0 and stored != raw):",
        new="    if False:",
        test="tests/unit/data/store/test_block.py::test_numbers_of_a_header_that_do_not_agree_are_refused_before_memory_is_taken",
        seconds=5,
    ),
]

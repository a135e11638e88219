"""Mutations of what is saved and loaded: the rows of *Checkpoints*."""

from promises import Mutation

FLIPS = "random bit flips are found"
CRASH = "a kill at any system call of a save"
GOOD = "the newest checkpoint from which a step was taken"
AGREED = "all ranks load one checkpoint"
HOSTILE = "loading runs no code"
PLACES = "hosts that share no folder save and go on"

CHECKPOINTS = [
    Mutation(
        promise=FLIPS,
        what="sums of a shard are not compared",
        file="src/shoal/checkpoint/shard.py",
        old="    if actual != expected:",
        new="    if False:",
        test="tests/chaos/test_bit_flips.py::test_a_thousand_flips_are_a_thousand_found",
        seconds=10,
    ),
    Mutation(
        promise=CRASH,
        what="the draft takes its name before its files are on the disk",
        file="src/shoal/checkpoint/files.py",
        old="            yield fd\n            os.fsync(fd)",
        new="            yield fd",
        test="tests/chaos/test_crash_consistency.py::test_files_are_durable_before_the_name_and_the_name_before_anything_is_deleted",
        seconds=10,
    ),
    Mutation(
        promise=CRASH,
        what="the old checkpoint of a name is deleted before the new one has it",
        file="src/shoal/checkpoint/commit.py",
        old="            os.rename(draft.final, draft.replaced)",
        new="            shutil.rmtree(draft.final)",
        test="tests/chaos/test_crash_consistency.py::test_a_kill_leaves_the_old_or_the_new",
        seconds=40,
    ),
    Mutation(
        promise=GOOD,
        what="the newest counts as good before a step was taken from it",
        file="src/shoal/checkpoint/retention.py",
        old="        return max((step for step in self._committed if step < self._taken), default=None)",
        new="        return max((step for step in self._committed if step <= self._taken), default=None)",
        test="tests/bugs/test_last_good_checkpoint.py::test_the_newest_checkpoint_that_a_step_was_taken_from_is_kept_and_named[1]",
        seconds=5,
    ),
    Mutation(
        promise=GOOD,
        what="the good one expires as any other",
        file="src/shoal/checkpoint/retention.py",
        old="    return [step for step in candidates if step not in stays and (keep_every",
        new="    return [step for step in candidates if (keep_every",
        test="tests/bugs/test_last_good_checkpoint.py::test_a_run_that_skips_every_step_after_it_blew_up_keeps_what_was_good",
        seconds=5,
    ),
    Mutation(
        promise=GOOD,
        what="an asynchronous schedule counts a step at once",
        file="src/shoal/trainer/loop.py",
        old="self.persistence.take(step + 1 - lag)",
        new="self.persistence.take(step)",
        test="tests/bugs/test_last_good_checkpoint.py::"
        "test_the_command_goes_on_with_a_lower_rate_under_every_plan[pp=2 schedule=pipedream-2bw microbatches=2]",
        seconds=20,
    ),
    Mutation(
        promise=GOOD,
        what="servers keep the newest alone",
        file="src/shoal/serverrun/server/recorder.py",
        old="            self._saver.take(made.versions)",
        new="            pass",
        test="tests/unit/serverrun/worker/test_downpour_loop.py::"
        "test_the_checkpoint_that_gradients_came_from_is_kept_beside_the_newest",
        seconds=5,
    ),
    Mutation(
        promise=AGREED,
        what="every rank reads what it finds under the name",
        file="src/shoal/checkpoint/whole.py",
        old="    if expect is not None and found != expect:",
        new="    if False:",
        test="tests/multiproc/test_resume_together.py::"
        "test_a_checkpoint_that_is_swapped_while_ranks_read_it_is_refused_by_all[dp=2 zero=3]",
        seconds=10,
    ),
    Mutation(
        promise=HOSTILE,
        what="links are followed",
        file="src/shoal/checkpoint/files.py",
        old="os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd",
        new="os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd",
        test="tests/chaos/test_hostile_checkpoints.py::test_a_hostile_checkpoint_is_refused",
        seconds=15,
    ),
    Mutation(
        promise=HOSTILE,
        what="a file of any name may be a shard",
        file="src/shoal/checkpoint/files.py",
        old='_SHARD = re.compile(r"rank-[0-9]{3,6}\\.safetensors", re.ASCII)',
        new='_SHARD = re.compile(r".*", re.ASCII)',
        test="tests/chaos/test_hostile_checkpoints.py::test_a_hostile_checkpoint_is_refused",
        seconds=15,
    ),
    Mutation(
        promise=PLACES,
        what="what comes from another host is not held to its sums",
        file="src/shoal/checkpoint/places/carry.py",
        old='                check_chunk(chunk, start, expected, f"{name} from rank {peer.rank}")\n',
        new="",
        test="tests/multiproc/test_place_faults.py::"
        "test_what_is_altered_on_its_way_to_the_first_host_fails_that_save_and_not_the_next",
        seconds=5,
    ),
    Mutation(
        promise=PLACES,
        what="a part of another save of the same step counts",
        file="src/shoal/checkpoint/places/bringing.py",
        old="            has_it = path is not None and offers.get(self._folders.rank, {}).get(candidate) == digest",
        new="            has_it = path is not None",
        test="tests/multiproc/test_place_faults.py::test_parts_of_two_saves_are_never_put_together",
        seconds=5,
    ),
    Mutation(
        promise=PLACES,
        what="a host that had not yet taken the name of a save throws its part away",
        file="src/shoal/checkpoint/commit.py",
        old="        if draft.id in finish:",
        new="        if False:",
        test="tests/chaos/test_place_kills.py::"
        "test_a_kill_between_the_names_of_two_hosts_leaves_one_whole_checkpoint[name]",
        seconds=5,
    ),
    Mutation(
        promise=PLACES,
        what="the first takes the name before all are prepared",
        file="src/shoal/checkpoint/places/hosts.py",
        old="        vote.exchange(draft.step, Phase.PREPARE, deadline, problem=problem)\n",
        new="",
        test="tests/chaos/test_place_kills.py::"
        "test_a_kill_between_the_names_of_two_hosts_leaves_one_whole_checkpoint[manifest]",
        seconds=5,
    ),
    Mutation(
        promise=PLACES,
        what="an upload that was cut short is committed",
        file="src/shoal/checkpoint/places/address.py",
        old='        if size != entry.size:\n            raise NotWhole(f"{name} has {size} bytes at',
        new='        if False:\n            raise NotWhole(f"{name} has {size} bytes at',
        test="tests/unit/checkpoint/places/test_address.py::"
        "test_a_shard_that_is_short_is_not_committed[rank-000.safetensors]",
        seconds=2,
    ),
]

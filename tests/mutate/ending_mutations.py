"""Mutations of how ranks, roles and commands end: the first rows of *Failure*."""

from promises import Mutation

DEAD = "a dead rank ends the run within seconds"
LAUNCHED = "a killed process of a run that"
FINISHED = "a run is completed, and a rank or a role has finished, when it said so itself"
LEAVING = "`sys.exit` or `os._exit` of a model or its data"
HANGS = "a rank that hangs is named with its stack"
FORKS = "what a rank or a role forked has no say for it"
STOPPED = "a stopped rank (SIGSTOP) is named"
SUPERVISOR = "`kill -9` of a rank, of its loaders or of the supervisor"
RESTART = "`--max-restarts N` starts the ranks again"
SIGNALS = "Ctrl-C and SIGTERM finish the step"
STAGE = "a rank that dies in the middle of a pipeline's step"

ENDINGS = [
    Mutation(
        promise=DEAD,
        what="the last rank is blamed, not the first",
        file="src/shoal/launch/blame.py",
        old="    first = min(suspects, key=lambda end: (_row(end), _when(end), end.rank))",
        new="    first = max(suspects, key=lambda end: (_row(end), _when(end), end.rank))",
        test="tests/multiproc/test_supervisor.py::test_exception_is_told_with_its_traceback_and_peers_are_not_blamed",
        seconds=5,
    ),
    Mutation(
        promise=DEAD,
        what="the death of one rank does not end the others",
        file="src/shoal/launch/ranks.py",
        old="            self._kill_all()  # the cause is known, and nobody else can say more about it",
        new="            pass",
        test="tests/multiproc/test_supervisor.py::test_kill_9_of_a_rank_is_named",
        seconds=15,
    ),
    Mutation(
        promise=LAUNCHED,
        what="who failed in consequence is taken for the cause of the launcher's kill",
        file="src/shoal/launch/clusters/culprits.py",
        old="        has_cause = has_cause or report is None or not report.peer_failure",
        new="        has_cause = True",
        test="tests/unit/launch/clusters/test_reading_launchers.py::test_a_killed_rank_is_the_culprit_though_the_other_reported_first",
        seconds=5,
    ),
    Mutation(
        promise=LAUNCHED,
        what="who the launcher ended is a suspect",
        file="src/shoal/launch/clusters/culprits.py",
        old="            found.add(rank)",
        new="            pass",
        test="tests/unit/launch/clusters/test_reading_launchers.py::test_an_exception_is_told_with_its_traceback",
        seconds=5,
    ),
    Mutation(
        promise=FINISHED,
        what="an exit code of 0 is enough",
        file="src/shoal/launch/blame.py",
        old='        return self.exit_code == EXIT_DONE and self.final_status == "completed"',
        new="        return self.exit_code == EXIT_DONE",
        test="tests/multiproc/test_supervisor.py::test_a_rank_that_ends_with_0_before_it_has_begun_is_named_at_once",
        seconds=5,
    ),
    Mutation(
        promise=FINISHED,
        what="an exit code of 0 of a role is enough",
        file="src/shoal/serverrun/job/job.py",
        old='state.pid == process.pid and state.final_status == "completed"',
        new="state.pid == process.pid",
        test="tests/bugs/test_left_without_a_word.py::test_a_worker_that_leaves_is_replaced_and_told_of",
        seconds=15,
    ),
    Mutation(
        promise=LEAVING,
        what="whoever calls sys.exit ends the command",
        file="src/shoal/cli/startup.py",
        old="        if os.getpid() != owner or trace is None or is_unread or _is_ours(trace.tb_frame):",
        new="        if True:",
        test="tests/unit/cli/test_startup.py::test_what_the_command_runs_cannot_end_it_with_success",
        seconds=5,
    ),
    Mutation(
        promise=LEAVING,
        what="os._exit is told of and keeps its code",
        file="src/shoal/cli/startup.py",
        old="        leave(EXIT_NO)",
        new="        leave(status)",
        test="tests/bugs/test_left_without_a_word.py::test_a_command_whose_own_process_is_left_is_no_success",
        seconds=15,
    ),
    Mutation(
        promise=HANGS,
        what="nobody is asked for a stack",
        file="src/shoal/launch/ranks.py",
        old="        self._ask_for_stacks(self._ranks)\n",
        new="",
        test="tests/multiproc/test_supervisor.py::test_a_rank_that_runs_in_circles_is_named_with_its_stack",
        seconds=5,
    ),
    Mutation(
        promise=HANGS,
        what="who was waited for is not asked when a peer gives up first",
        file="src/shoal/launch/ranks.py",
        old="            if end.report is not None and end.report.peer_failure:",
        new="            if False:",
        test="tests/bugs/test_left_without_a_word.py::"
        "test_a_deadlock_is_told_with_its_stack_though_the_peer_gave_up_first",
        seconds=10,
    ),
    Mutation(
        promise=FORKS,
        what="a fork says that its rank is done",
        file="src/shoal/telemetry/statusboard.py",
        old="        if self._words[_PID] == os.getpid():",
        new="        if True:",
        test="tests/multiproc/test_supervisor.py::test_what_a_fork_says_is_not_the_word_of_its_rank",
        seconds=5,
    ),
    Mutation(
        promise=FORKS,
        what="what a role forked is left running",
        file="src/shoal/launch/process.py",
        old="            if _CAN_LOOK:\n                kill_group(self.pid)\n",
        new="",
        test="tests/bugs/test_forked_by_the_user.py::test_children_of_a_worker_end_with_the_run",
        seconds=15,
    ),
    Mutation(
        promise=STOPPED,
        what="nobody looks at heartbeats",
        file="src/shoal/launch/hangs.py",
        old="    if not ages or max(ages)[0] <= deadline:",
        new="    if True:",
        test="tests/multiproc/test_supervisor.py::test_sigstop_is_named_within_the_deadline",
        seconds=15,
    ),
    Mutation(
        promise=SUPERVISOR,
        what="ranks do not ask the kernel to die with their parent",
        file="src/shoal/comm/parentdeath.py",
        old="        _ask_kernel()\n    else:",
        new="        pass\n    else:",
        test="tests/multiproc/test_supervisor_death.py::test_kill_9_of_the_supervisor_leaves_no_process",
        seconds=10,
    ),
    Mutation(
        promise=SUPERVISOR,
        what="loaders hand batches over by torch's sockets",
        file="src/shoal/data/loading/sharedmemory.py",
        old="        if not self._is_open or not all(_is_plain(tensor) for tensor in tensors):",
        new="        if True:",
        test="tests/bugs/test_forked_by_the_user.py::test_a_killed_rank_with_loaders_leaves_no_socket",
        seconds=10,
    ),
    Mutation(
        promise=SUPERVISOR,
        what="the directory of a killed job is not found",
        file="src/shoal/launch/jobdirectory.py",
        old="        os.close(descriptor)\n    return True",
        new="        os.close(descriptor)\n    return False",
        test="tests/unit/doctor/test_leftovers.py::test_the_directory_of_a_job_is_a_leftover_once_the_job_was_killed",
        seconds=5,
    ),
    Mutation(
        promise=RESTART,
        what="a restart begins again from nothing",
        file="src/shoal/checkpoint/agreement.py",
        old="        told[0] = 1 + (parse_step(chosen.name) or 0)\n",
        new="        told[0] = 0\n",
        test="tests/multiproc/test_failures.py::test_a_killed_rank_is_restarted_from_the_newest_checkpoint",
        seconds=20,
    ),
    Mutation(
        promise=RESTART,
        what="one restart fewer than was allowed",
        file="src/shoal/launch/group/generations.py",
        old="number < request.config.max_restarts\n",
        new="number + 1 < request.config.max_restarts\n",
        test="tests/multiproc/test_supervisor_signals.py::test_restarts_are_given_up_after_n",
        seconds=10,
    ),
    Mutation(
        promise=SIGNALS,
        what="a stop saves nothing",
        file="src/shoal/trainer/loop.py",
        old='            self.status = "interrupted"',
        new='            self.persistence.saver = None\n            self.status = "interrupted"',
        test="tests/multiproc/test_failures.py::test_a_signal_finishes_the_step_and_writes_a_checkpoint",
        seconds=15,
    ),
    Mutation(
        promise=STAGE,
        what="whoever a signal killed counts as ended by the supervisor",
        file="src/shoal/launch/blame.py",
        old="self.exit_code is None or (self.exit_code < 0 and -self.exit_code in self.signals_sent)",
        new="self.exit_code is None or self.exit_code < 0",
        test="tests/multiproc/test_pipeline_failures.py::test_a_stage_that_dies_in_a_step_is_named_and_nothing_hangs[1f1b-0.0]",
        seconds=20,
    ),
]

"""Mutations of what is computed: the rows of *Numerics* and *Checkpoints*."""

from promises import Mutation

DATA = "`dp` with `zero` 0 to 3"
GLOO = "the same over gloo or nccl"
SPLIT = "`tp`, `sp`, `cp` and their mixtures"
PIPELINE = "a synchronous schedule of a pipeline"
DELAYED = "`pipedream`, `pipedream-vsync`, `pipedream-2bw`"
SERVERS = "`bsp` and `ssp:0` with N workers"
GROUPS = "the same with workers that are groups"
COUNTED = "collectives and bytes per step"
PREDICT = "`shoal predict` says the same of a row"
MEAN = "the mean is over the global batch"
DRAWS = "initial weights and dropout masks"
RESUME = "resuming ends in the same weights"
BATCH_NORM = "batch norm's running statistics"
FLIPS = "random bit flips are found"
CRASH = "a kill at any system call of a save"
HOSTILE = "loading runs no code"

RESUMED = "tests/multiproc/test_resume.py::test_killed_and_resumed_equals_left_alone"

NUMERICS = [
    Mutation(
        promise=DATA,
        what="replicas are added in another order than that of ranks",
        file="src/shoal/comm/shared.py",
        old="        total = parts[0]\n        for part in parts[1:-1]:",
        new="        parts = [*parts[1:], parts[0]]\n        total = parts[0]\n        for part in parts[1:-1]:",
        test="tests/parity/test_data_parallel.py::test_three_replicas_give_the_bits_of_one_process_too",
        seconds=15,
    ),
    Mutation(
        promise=DATA,
        what="the bucket of a step is not summed over replicas",
        file="src/shoal/parallel/data.py",
        old="ready.set_result(channel.sum_(bucket.buffer()))",
        new="ready.set_result(bucket.buffer())",
        test="tests/parity/test_data_parallel.py::test_two_replicas_give_the_bits_of_one_process[gpt]",
        seconds=15,
    ),
    Mutation(
        promise=DATA,
        what="updated shards are not brought back to the other replicas",
        file="src/shoal/parallel/zero/apply.py",
        old="            channel.gather(own, whole, unit.counts)",
        new="            pass",
        test="tests/parity/test_zero.py::test_two_replicas_give_the_bits_of_one_process[gpt-1]",
        seconds=20,
    ),
    Mutation(
        promise=DATA,
        what="gradients are not clipped",
        file="src/shoal/trainer/step.py",
        old="clip_(gradients.values(), norm=norm, limit=self.clip, loss_scale=loss_scale.scale)",
        new="clip_(gradients.values(), norm=norm, limit=None, loss_scale=loss_scale.scale)",
        test="tests/parity/test_data_parallel.py::test_two_replicas_give_the_bits_of_one_process[gpt tied, clipped]",
        seconds=20,
    ),
    Mutation(
        promise=GLOO,
        what="a shard is reduced to the next rank",
        file="src/shoal/comm/channel.py",
        old="dist.reduce(part, self.ranks[root], group=self.group)",
        new="dist.reduce(part, self.ranks[root - 1], group=self.group)",
        test="tests/parity/test_zero.py::test_gloo_gives_the_same_bits_with_two_replicas",
        seconds=20,
    ),
    Mutation(
        promise=SPLIT,
        what="tp: the gradient of what enters split layers is not summed",
        file="src/shoal/parallel/tensor/crossing.py",
        old="return ctx.channel.sum_(grads[0].contiguous()), None",
        new="return grads[0].contiguous(), None",
        test="tests/parity/test_tensor.py::test_equals_one_process[2]",
        seconds=20,
    ),
    Mutation(
        promise=SPLIT,
        what="sp: gradients of the layers between are not summed",
        file="src/shoal/trainer/step.py",
        old="        if self.partial:\n            sum_partial_(",
        new="        if False:\n            sum_partial_(",
        test="tests/multiproc/test_verify.py::test_plans_are_proved_and_certified",
        seconds=20,
    ),
    Mutation(
        promise=SPLIT,
        what="cp: gathered positions are added from one rank only",
        file="src/shoal/parallel/context/positions.py",
        old="        channel.scatter_sum(stacked.flatten(), own.flatten(), [own.numel()] * channel.size)",
        new="        own.copy_(stacked[channel.rank])",
        test="tests/parity/test_context.py::test_two_ranks_equal_one_process",
        seconds=30,
    ),
    Mutation(
        promise=PIPELINE,
        what="the gradient that comes from the next stage is doubled",
        file="src/shoal/pipeline/runtime.py",
        old="grads = self._take(desk, (Point.GRADIENT, stage + 1, microbatch))",
        new="grads = [2 * grad for grad in self._take(desk, (Point.GRADIENT, stage + 1, microbatch))]",
        test="tests/parity/test_pipeline.py::test_a_synchronous_schedule_equals_one_process[gpt-2-1f1b]",
        seconds=25,
    ),
    Mutation(
        promise=PIPELINE,
        what="stages that share a weight do not add its gradients",
        file="src/shoal/pipeline/reduction.py",
        old="        self._shared.finish()\n",
        new="        pass\n",
        test="tests/multiproc/test_pipeline_runs.py::test_tied_weights_are_trained_by_both_ends",
        seconds=20,
    ),
    Mutation(
        promise=DELAYED,
        what="a stage computes with the version after the one that the paper names",
        file="src/shoal/pipeline/versions.py",
        old="return max(0, microbatch - (self.num_stages - 1 - stage))",
        new="return max(0, microbatch - (self.num_stages - 2 - stage))",
        test="tests/parity/test_pipeline.py::test_an_asynchronous_schedule_equals_the_papers_rule[gpt-2-pipedream]",
        seconds=15,
    ),
    Mutation(
        promise=SERVERS,
        what="the shares of a step are added in the order of arrival",
        file="src/shoal/paramserver/consistency.py",
        old="tuple(sorted(of_step, key=lambda one: one.portions[0]))",
        new="tuple(of_step)",
        test="tests/unit/paramserver/test_consistency.py::test_a_stepwise_round_is_all_shares_in_share_order_whatever_their_arrival",
        seconds=5,
    ),
    Mutation(
        promise=SERVERS,
        what="the servers' optimizer has another learning rate",
        file="src/shoal/paramserver/shard.py",
        old="        set_rate(self._optimizer, lr)",
        new="        set_rate(self._optimizer, lr * 1.0001)",
        test="tests/multiproc/test_server_runs.py::test_async_with_one_worker_is_plain_training_bit_for_bit",
        seconds=20,
    ),
    Mutation(
        promise=GROUPS,
        what="the last share is counted twice",
        file="src/shoal/paramserver/shard.py",
        old="        for gradient in gradients[1:]:\n            total += gradient",
        new="        for gradient in [*gradients[1:], gradients[-1]]:\n            total += gradient",
        test="tests/parity/test_server_groups.py::test_workers_that_are_pipelines_end_in_the_bits_of_replicated_pipelines",
        seconds=40,
    ),
    Mutation(
        promise=COUNTED,
        what="a sum crosses and is not noted",
        file="src/shoal/comm/channel.py",
        old='            self.ledger.note(self.axis, "sum", tensor.nbytes)',
        new="            pass",
        test="tests/multiproc/test_verify.py::test_plans_are_proved_and_certified",
        seconds=20,
    ),
    Mutation(
        promise=COUNTED,
        what="verify compares calls and not bytes",
        file="src/shoal/verify/judge.py",
        old="                if list(found) != list(wanted):",
        new="                if found[0] != wanted[0]:",
        test="tests/unit/verify/test_judge.py::test_traffic_is_compared_to_the_byte",
        seconds=5,
    ),
    Mutation(
        promise=PREDICT,
        what="a share is read as percent when what was measured is above one",
        file="src/shoal/planner/predict.py",
        old="with_recompute=False) * 1e12 / job.cluster",
        new="with_recompute=False) * (1e14 if (run.measured or 0) > 1 else 1e12) / job.cluster",
        test="tests/unit/planner/test_predict.py::test_what_was_measured_does_not_change_what_is_predicted",
        seconds=10,
    ),
    Mutation(
        promise=MEAN,
        what="every microbatch counts alike",
        file="src/shoal/trainer/step.py",
        old="loss = objective(microbatch, microbatch.weight / total, stop)",
        new="loss = objective(microbatch, 1.0 / self.num_microbatches / self.mesh.replicas.size, stop)",
        test="tests/parity/test_data_parallel.py::test_two_replicas_give_the_bits_of_one_process[seq2seq, ragged]",
        seconds=15,
    ),
    Mutation(
        promise=DRAWS,
        what="a mask is drawn by a sample's place in its microbatch",
        file="src/shoal/models/draws.py",
        old="            for row, sample in zip(words, samples, strict=True):\n",
        new="            for sample, row in enumerate(words):\n",
        test="tests/unit/models/test_dropout.py::test_the_split_into_microbatches_changes_no_bit",
        seconds=5,
    ),
    Mutation(
        promise=DRAWS,
        what="every module draws the same mask",
        file="src/shoal/models/draws.py",
        old='derive_key("dropout", seed, path)',
        new='derive_key("dropout", seed)',
        test="tests/unit/models/test_dropout.py::test_seed_step_sample_module_and_call_each_change_the_bits",
        seconds=5,
    ),
    *(
        Mutation(
            promise=RESUME,
            what=f"optimizer state is not restored, {plan}",
            file="src/shoal/trainer/state.py",
            old="        target.copy_(tensors[name])\n",
            new='        if not name.startswith("optimizer/"):\n            target.copy_(tensors[name])\n',
            test=f"{RESUMED}[{plan}]",
            seconds=15,
        )
        for plan in ("dp=2", "dp=2 zero=3", "pp=2 microbatches=2")
    ),
    *(
        Mutation(
            promise=RESUME,
            what=f"the random state of {whose} is not restored",
            file="src/shoal/trainer/rng.py",
            old=old,
            new="        pass\n",
            test=f"{RESUMED}[dp=2]",
            seconds=15,
        )
        for whose, old in (
            ("torch", '        torch.set_rng_state(states[f"{prefix}/torch"])\n'),
            (
                "Python",
                "        random.setstate((3, tuple(python_words), python_gauss if has_python_gauss else None))\n",
            ),
            ("numpy", '        np.random.set_state(("MT19937", words, int(position), int(has_gauss), gauss))\n'),
        )
    ),
    Mutation(
        promise=RESUME,
        what="the data goes on one sample later",
        file="src/shoal/trainer/state.py",
        old='position=Position(**plain.pop("position")),',
        new='position=Position(**{**(at := plain.pop("position")), "offset": at["offset"] + 1}),',
        test=f"{RESUMED}[dp=2 zero=3]",
        seconds=15,
    ),
    Mutation(
        promise=RESUME,
        what="a resumed run begins again from nothing",
        file="src/shoal/trainer/persist.py",
        old="return 0 if step is None else step + 1",
        new="return 0",
        test=f"{RESUMED}[dp=2]",
        seconds=15,
    ),
    Mutation(
        promise=RESUME,
        what="a look at another stage's units moves Python's generator",
        file="src/shoal/telemetry/draws.py",
        old="        random.setstate(of_python)\n",
        new="        pass\n",
        test=f"{RESUMED}[pp=2 microbatches=2]",
        seconds=15,
    ),
    Mutation(
        promise=RESUME,
        what="old versions of an asynchronous pipeline are not saved",
        file="src/shoal/pipeline/versions.py",
        old="return sorted(version for version in used if version < newest)",
        new="return []",
        test="tests/multiproc/test_pipeline_resume.py::test_a_checkpoint_keeps_the_versions_that_are_still_to_be_used",
        seconds=25,
    ),
    Mutation(
        promise=BATCH_NORM,
        what="replicas keep their own statistics",
        file="src/shoal/parallel/batchnorm.py",
        old="    if group is None or layers[0].is_synchronised:",
        new="    if True:",
        test="tests/multiproc/test_batchnorm.py::test_local_replicas_have_the_bits_of_one_process",
        seconds=20,
    ),
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
        file="src/shoal/checkpoint/layout.py",
        old='_SHARD = re.compile(r"rank-[0-9]{3,6}\\.safetensors", re.ASCII)',
        new='_SHARD = re.compile(r".*", re.ASCII)',
        test="tests/chaos/test_hostile_checkpoints.py::test_a_hostile_checkpoint_is_refused",
        seconds=15,
    ),
]

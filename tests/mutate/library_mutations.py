"""Mutations of a script's own run: rows of *A script of your own*."""

from promises import Mutation

LOOP = "a script ends in the weights of a plain PyTorch loop"
RESUME = "a script that is resumed has its optimizer"
DETOURS = "a script that goes past its run is refused"
EXPORT = "an export of a script gives what the trained model gives"

LIBRARY = [
    Mutation(
        promise=LOOP,
        what="weights that a script's optimizer has updated stay where other ranks do not read them",
        file="src/shoal/engine/model.py",
        old="            self.islands.end_step()\n        self.reduction.publish()\n\n    def update(",
        new="            self.islands.end_step()\n\n    def update(",
        test="tests/parity/test_library_run.py::test_the_script_under_every_plan_is_plain_pytorch",
        seconds=10,
    ),
    Mutation(
        promise=RESUME,
        what="schedulers begin anew",
        file="src/shoal/library/saving.py",
        old="        scheduler.load_state_dict(values)",
        new="        scheduler.state_dict()",
        test="tests/unit/library/test_run.py::test_a_scheduler_may_count_the_steps_of_a_loader_before_setup_and_resume",
        seconds=3,
    ),
    Mutation(
        promise=DETOURS,
        what="a parameter that is unfrozen after the setup is not seen",
        file="src/shoal/library/detours.py",
        old="            if one.requires_grad != was_trained:",
        new="            if one.requires_grad and was_trained is None:",
        test="tests/unit/library/test_run.py::test_a_mistake_of_a_script_is_one_message_with_the_fix",
        seconds=5,
    ),
    Mutation(
        promise=DETOURS,
        what="an optimizer with parts of tensors gives its state away",
        file="src/shoal/library/detours.py",
        old="        own.optimizer.register_state_dict_pre_hook(refuse)",
        new="        own.optimizer.register_state_dict_pre_hook(lambda *_: None)",
        test="tests/parity/test_library_run.py::test_what_would_be_wrong_without_a_word_is_refused_with_the_way_to_do_it",
        seconds=3,
    ),
    Mutation(
        promise=EXPORT,
        what="the module that is written keeps the weights that it was built with",
        file="src/shoal/library/exporting.py",
        old="        model.load_state_dict(dict(weights))",
        new="        model.load_state_dict(model.state_dict())",
        test="tests/multiproc/test_export_script.py::test_ranks_with_shards_write_one_program_with_the_whole_weights",
        seconds=10,
    ),
]

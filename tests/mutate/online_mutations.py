"""Mutations of publishing and serving: the rows of *Online*."""

from promises import Mutation

WHOLE = "a model that is served is whole"
GATE = "a refresh that is worse than `publish.bound` allows is not published"
ANSWER = "an answer of `shoal serve` is that of the version that it names"

ONLINE = [
    Mutation(
        promise=WHOLE,
        what="the pointer is replaced before the weights have their name",
        file="src/shoal/checkpoint/published/versions.py",
        old="        os.rename(draft, root / version_name(number))",
        new="        _point(root, number, hashlib.sha256(data).hexdigest()), os.rename(draft, root / version_name(number))",
        test="tests/chaos/test_publish_kills.py::test_a_kill_around_each_rename_leaves_the_old_version_or_the_new",
        seconds=5,
    ),
    Mutation(
        promise=WHOLE,
        what="files of a version are not held to their sums",
        file="src/shoal/checkpoint/published/versions.py",
        old="    if found != entry.sha256:",
        new="    if False:",
        test="tests/unit/checkpoint/published/test_versions.py::test_a_flipped_bit_and_a_cut_are_refused_with_the_file[model.safetensors]",
        seconds=2,
    ),
    Mutation(
        promise=GATE,
        what="the decision is not heeded",
        file="src/shoal/trainer/online/publisher.py",
        old="        if not self._agree(decision.is_good):",
        new="        if not self._agree(True):",
        test="tests/multiproc/test_serve.py::test_a_refresh_that_is_worse_is_not_published",
        seconds=20,
    ),
    Mutation(
        promise=GATE,
        what="a loss that is not finite is good",
        file="src/shoal/trainer/online/gate.py",
        old="    if not math.isfinite(loss):",
        new="    if False:",
        test="tests/unit/trainer/online/test_gate.py::test_a_refresh_is_held_to_the_last_published_loss",
        seconds=2,
    ),
    Mutation(
        promise=ANSWER,
        what="rows of one pass get each other's scores",
        file="src/shoal/serve/models.py",
        old="                found |= zip(group, self._forward(filled)[: len(group)], strict=True)",
        new="                found |= zip(group, self._forward(filled)[: len(group)][::-1], strict=True)",
        test="tests/multiproc/test_serve.py::test_answers_are_those_of_the_version_bit_for_bit_whoever_else_asks",
        seconds=20,
    ),
]

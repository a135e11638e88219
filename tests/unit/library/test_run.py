"""``shoal.Run`` in one process: what a script may ask before it sets up, and what is refused with the fix."""

import re
import tempfile

import pytest
import torch
from torch import nn

import shoal

DATA = [(torch.full((8,), float(index % 5)), index % 3) for index in range(32)]
LOSS = nn.CrossEntropyLoss()


def set_up(run, *, model=None, optimizer=torch.optim.SGD, **options):
    model = nn.Linear(8, 3) if model is None else model
    return run.setup(model, optimizer(model.parameters(), lr=0.1), loss=LOSS, **options)


def test_a_scheduler_may_count_the_steps_of_a_loader_before_setup_and_resume(tmp_path):
    """``len(loader)`` begins nothing, so a resumed run loads into what is set up; the epoch is the checkpoint's, and says so."""
    before = None
    for is_resumed in (False, True):
        with shoal.Run(run_dir=tmp_path, resume=is_resumed) as run:
            model = nn.Linear(8, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loader = run.loader(DATA, global_batch=8)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * len(loader))
            if is_resumed:
                with pytest.raises(shoal.RequestError, match=r"after run\.setup"):
                    loader.epoch  # noqa: B018
            model, optimizer, scheduler = run.setup(model, optimizer, scheduler, loss=LOSS)
            if is_resumed:
                # An evaluation before the first step is one of the loaded weights.
                assert run.evaluate(DATA).loss == before
            for batch in loader:
                run.step(batch)
            before = run.evaluate(DATA).loss
            assert run.step_count == (8 if is_resumed else 4) and scheduler.last_epoch == run.step_count


def test_what_changed_since_a_save_of_the_same_step_is_saved_too(tmp_path):
    """A scheduler that steps after the save of an epoch, and a second model that is ahead of the first."""
    weights, rates = [], []
    for is_resumed in (False, True):
        with shoal.Run(run_dir=tmp_path, resume=is_resumed) as run:
            first, second = nn.Linear(8, 3), nn.Linear(8, 3)
            optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (first, second)]
            scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, gamma=0.5)
            loader = run.loader(DATA, global_batch=8)
            run.setup(first, optimizers[0], scheduler, loss=LOSS)
            run.setup(second, optimizers[1], loss=LOSS, name="second")
            if not is_resumed:
                run.forward_backward(loader.next(), model=first)
                optimizers[0].step()
                run.save(wait=True)
                scheduler.step()
                run.forward_backward(loader.next(), model=second)
                optimizers[1].step()
            assert run.step_count == 1 and loader.position.offset == 16
            weights.append(run.state_dict(model=second)["weight"])
            rates.append(optimizers[0].param_groups[0]["lr"])
    assert torch.equal(*weights) and rates == [0.05, 0.05]


def test_a_plateau_is_left_to_the_script_and_a_step_gives_its_metrics():
    def own_step(model, batch):
        inputs, targets = batch
        scores = model(inputs)
        return {"loss": LOSS(scores, targets), "size": scores.square().mean()}

    with shoal.Run() as run:
        model = nn.Linear(8, 3)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        loader = run.loader(DATA, global_batch=8)
        run.setup(model, optimizer, plateau, step=own_step)
        for batch in loader:
            assert run.step(batch).metrics == run.metrics and run.metrics["size"] > 0
        plateau.step(1.0)
        plateau.step(2.0)
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_what_cannot_be_is_refused_with_the_fix():
    with pytest.raises(shoal.RequestError, match=r"with shoal\.Run"):
        shoal.Run().loader(DATA, global_batch=8)
    with shoal.Run() as run:
        run.loader(DATA, global_batch=8)
        first, _ = set_up(run)
        with pytest.raises(shoal.RequestError, match=r"given a tuple; iterate over that loader"):
            run.forward_backward((torch.zeros(1, 8), torch.zeros(1)))
        with pytest.raises(shoal.RequestError, match=r"trained parameter '1.weight' of a Linear"):
            set_up(run, model=nn.Sequential(nn.Linear(8, 8), first))
        set_up(run, name="second")
        with pytest.raises(shoal.RequestError, match=r"name="):
            set_up(run, name="second")
        with pytest.raises(shoal.RequestError, match=r"after run\.setup|run_dir"):
            run.save()
    with shoal.Run(hooks=[shoal.EMA(0.5)]) as run:
        run.loader(DATA, global_batch=8)
        set_up(run)
        with pytest.raises(shoal.RequestError, match=r"hooks=\[EMA"):
            set_up(run)


def weights_only(run):
    return run.setup(nn.Linear(8, 3), loss=LOSS)


def step_twice(run):
    _, optimizer = set_up(run)
    run.step(run.loaders[0].next())
    optimizer.step()


def clip_late(run):
    _, optimizer = set_up(run)
    run.forward_backward(run.loaders[0].next())
    optimizer.step()
    run.clip(1.0)


def clip_by(norm):
    def clip(run):
        set_up(run)
        run.step(run.loaders[0].next(), max_norm=norm)

    return clip


def unpack(run):
    set_up(run)
    for _inputs, _targets in run.loaders[0]:
        pass


def zero_late(run):
    _, optimizer = set_up(run)
    run.forward_backward(run.loaders[0].next())
    optimizer.zero_grad()
    optimizer.step()


def unfreeze(run):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    set_up(run, model=model)
    run.step(run.loaders[0].next())
    model[0].requires_grad_(True)
    run.step(run.loaders[0].next())


def add_a_group(run):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
    _, optimizer = run.setup(model, torch.optim.SGD(model[1].parameters(), lr=0.1), loss=LOSS)
    optimizer.add_param_group({"params": list(model[0].parameters())})
    run.step(run.loaders[0].next())


def accumulate(run):
    _, optimizer = set_up(run)
    for index, batch in enumerate(run.loaders[0]):
        run.forward_backward(batch)
        if index % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def export(format, plain=None, **changed):
    def write(run):
        model, _ = set_up(run)
        with tempfile.TemporaryDirectory() as folder:
            path = changed.get("path", f"{folder}/out")
            run.export(path, format=format, plain=model if plain == "itself" else plain)

    return write


def step_after_the_end(run):
    set_up(run)
    run.close()
    run.step(run.loaders[0].next())


def keep_the_best_nowhere(run):
    set_up(run, hooks=[shoal.BestCheckpoint()])


def load_a_pickle(run):
    with tempfile.TemporaryDirectory() as folder:
        torch.save({}, f"{folder}/weights.pt")
        shoal.load_weights(nn.Linear(8, 3), f"{folder}/weights.pt")


def set_up_again(run):
    model, optimizer = set_up(run)
    run.setup(model, optimizer, loss=LOSS)


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (lambda run: run.loader(DATA, 8, batch_size=4), "no 'batch_size'; global_batch= is the samples of a step"),
        (lambda run: run.loader(DATA, batch_size=4), "no 'batch_size'; global_batch= is the samples of a step"),
        (lambda run: run.loader(DATA), "needs the size of a batch: global_batch="),
        (lambda run: next(shoal.EMA().whole_weights()), r"give it to run\.setup\(hooks="),
        (lambda run: run.loader(DATA, 8, generator=None), r"no 'generator'; .* shoal\.Run\(seed=\)"),
        (lambda run: run.loader(None, 8), "the dataset is a NoneType, which is no map-style dataset; give an object"),
        (lambda run: run.loader([], 8), "the dataset, a list, has 0 samples"),
        (lambda run: run.loader(DATA, "eight"), "global_batch"),
        (lambda run: run.setup(nn.Linear(8, 3), torch.optim.SGD, loss=LOSS), "the class SGD; give it one such as SGD"),
        (lambda run: set_up(run, data=run.loaders[0]) and run.evaluate([1]), "a sample is a int"),
        (weights_only, r"a loss and no optimizer; .* run\.setup\(model, optimizer, loss"),
        (lambda run: run.setup(nn.Linear(8, 3), loss=nn.CrossEntropyLoss), "is a class; give an object of it"),
        (lambda run: run.setup(nn.Linear(8, 3), step="mine"), "step='mine' is no function"),
        (step_twice, r"without a new run\.forward_backward\(batch\) before it: run\.step\(batch\) has its own"),
        (clip_late, r"no new gradient to clip; call it after run\.forward_backward\(batch\) and before"),
        (clip_by(-1.0), "max_norm=-1.0 is no longest norm"),
        (clip_by("1"), "max_norm='1' is no longest norm"),
        (zero_late, r"zero_grad\(\) was called after run\.forward_backward\(batch\)"),
        (unfreeze, r"parameter '0.weight' of Sequential was frozen in run\.setup .* group of its own with lr=0\.0"),
        (add_a_group, r"the SGD got parameters after run\.setup"),
        (accumulate, r"not added up over calls\. .* global_batch=, .* as micro_batch="),
        (export("onxx"), "no format 'onxx'; did you mean 'onnx'"),
        (export("torch-export"), r"which only the script can build: give plain=Linear\(\.\.\.\)"),
        (export("torch-export", "itself"), "was given the Linear that is trained"),
        (export("torch-export", 3), r"run\.export\(plain=3\) is no module"),
        (export("torch-export", lambda: 3), r"run\.export\(plain=\) makes a int"),
        (export("torch-export", nn.Linear(8, 4)), r"not built as the model that is trained.* size mismatch for weight"),
        (export("safetensors", path=3), r"run\.export\(3\) is no path"),
        (export("safetensors", path=tempfile.gettempdir()), "already exists; give another folder"),
        (step_after_the_end, "this run is over"),
        (keep_the_best_nowhere, "this run has no run_dir"),
        (load_a_pickle, "a file of torch.save, a pickle"),
        (lambda run: run.setup(nn.DataParallel(nn.Linear(8, 3))), "takes the place of DataParallel"),
        (lambda run: set_up(run, data=DATA), "a loader of the run, and was given a list"),
        (lambda run: set_up(run, name="a/b"), "give a word of letters and digits"),
        (lambda run: set_up(run, hooks=shoal.EMA()), "give a list of hooks"),
        (lambda run: run.setup(nn.Linear(8, 3), LOSS), "given a CrossEntropyLoss; give a loss by name"),
        (lambda run: run.loader(DATA, 8, collate_fn=shoal.PadCollate), "give one of it: PadCollate"),
        (lambda run: run.loader(DATA, 8, weights="a"), "weights of samples must be numbers"),
        (lambda run: set_up(run) and run.evaluate(DATA, batch=-3), r"run\.evaluate\(batch=-3\) is no number"),
        (lambda run: set_up(run) and run.evaluate(DATA, limit=-1), r"run\.evaluate\(limit=-1\) is no number"),
        (lambda run: run.evaluate(torch.utils.data.DataLoader(DATA)), "not a DataLoader; give loader.dataset"),
        (lambda run: run.log(3), "takes names with numbers, and was given 3"),
        (lambda run: shoal.find_rate(3), r"takes the shoal\.Run in which a model is set up"),
        (lambda run: shoal.all_gather(3), "got a int; give it a tensor"),
        (lambda run: shoal.load_weights(nn.Linear(8, 3), "nowhere", rename=["a"]), "is a dict of beginnings of names"),
        (lambda run: shoal.EarlyStopping(mode="mix"), "mode='mix' is none"),
        (lambda run: shoal.EMA(decay="a"), "decay 'a' is how much of the average stays"),
        (lambda run: run.loaders[0].next()[0], "is not unpacked"),
        (unpack, "is not unpacked: write `for batch in loader`"),
        (set_up_again, "this Linear is set up already"),
        (
            lambda run: set_up(run, model=nn.Linear(8, 3, device="meta")),
            "'weight' of Linear is on the meta device and has no",
        ),
        (lambda run: run.log(name="a"), r"run\.log\(name=\.\.\.\) was given a str"),
        (lambda run: run.log({"size": torch.ones(2)}), r"run\.log\(size=\.\.\.\) was given \(2,\) float32"),
        (lambda run: set_up(run) and run.evaluate(DATA, metrics=["acuracy"]), "did you mean 'accuracy'"),
        (lambda run: set_up(run) and run.evaluate(DATA, metrics=[len]), "a metric is a name or an object such as"),
    ],
)
def test_a_mistake_of_a_script_is_one_message_with_the_fix(mistake, words):
    with pytest.raises(shoal.RequestError, match=words), shoal.Run() as run:
        run.loader(DATA, 8)
        mistake(run)


def test_metrics_have_names_and_a_logged_dict_is_that_of_its_numbers(tmp_path):
    with shoal.Run(run_dir=tmp_path) as run:
        run.loader(DATA, global_batch=8)
        set_up(run)
        found = run.evaluate(DATA, metrics=["top2", "f1"])
        run.log({"size": torch.tensor(2.0)}, other=1)
        assert set(found.metrics) == {"top2", "f1"}
    assert '{"size": 2.0, "other": 1.0}' in (tmp_path / "events" / "rank-000.jsonl").read_text()


def test_a_model_that_fails_says_with_what_it_was_called_and_a_loss_that_is_no_number_is_told_of_once(capsys):
    named = [{"x": inputs, "labels": label} for inputs, label in DATA]
    for data, shown in ((DATA, r"called with \(8, 8\) float32"), (named, "called with a dict of 'x'")):
        with pytest.raises((RuntimeError, TypeError)) as failed, shoal.Run() as run:
            loader = run.loader(data, global_batch=8)
            set_up(run, model=nn.Linear(9, 3))
            run.step(loader.next())
        assert re.search(shown, failed.value.__notes__[0])
    with shoal.Run() as run:
        loader = run.loader([(inputs * float("nan"), label) for inputs, label in DATA], global_batch=8)
        _, optimizer = set_up(run)
        for batch in loader.steps(2):
            assert run.forward_backward(batch) != 0
            optimizer.step()
    assert capsys.readouterr().err.count("run.step(batch) leaves such steps out") == 1


def test_an_optimizer_that_computes_its_gradient_itself_may():
    """A closure is called inside the step, after the look for a new gradient."""
    with shoal.Run() as run:
        loader = run.loader(DATA, global_batch=8)
        _, optimizer = set_up(run)
        for batch in loader:
            optimizer.step(lambda batch=batch: run.forward_backward(batch))
        assert run.step_count == 4


def test_what_is_trained_later_has_a_rate_of_nothing_until_then():
    """The way that is named to who unfreezes after the setup: weights and their decay wait for the rate."""
    with shoal.Run() as run:
        loader = run.loader(DATA, global_batch=8)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))
        groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[1].parameters()}]
        _, optimizer = run.setup(model, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.5), loss=LOSS)
        before = [one.detach().clone() for one in model.parameters()]
        run.step(loader.next())
        assert [torch.equal(*one) for one in zip(before, model.parameters(), strict=True)] == [True, True, False, False]
        optimizer.param_groups[0]["lr"] = 0.1
        run.step(loader.next())
        assert not torch.equal(before[0], model[0].weight)


def test_a_gradient_that_is_not_used_is_told_of_once_and_one_that_is_forgotten_is_not(capsys):
    with shoal.Run() as run:
        loader = run.loader(DATA, global_batch=8)
        _, optimizer = set_up(run)
        batch = loader.next()
        run.forward_backward(batch)
        run.forward_backward(batch)
        optimizer.zero_grad(set_to_none=False)
        run.step(loader.next())
        assert "not added up" not in capsys.readouterr().err
        for _ in range(3):
            run.forward_backward(loader.next())
        assert capsys.readouterr().err.count("gradients are not added up over calls") == 1
        optimizer.step()


def test_a_loss_without_a_gradient_and_a_batch_that_counts_for_nothing():
    """The first is refused at the first step, as in recipes; the second adds nothing to an evaluation, and no NaN either."""
    with shoal.Run() as run:
        loader = run.loader(DATA, global_batch=8)
        model = nn.Linear(8, 3)
        run.setup(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss=lambda output, _: output.detach().square().mean()
        )
        with pytest.raises(shoal.RunError, match="nothing would be trained"):
            run.forward_backward(next(iter(loader)))
        with pytest.raises(shoal.RequestError, match=r"no run_dir|needs a place"):
            run.save()
    with shoal.Run() as run:
        ignored = [(torch.ones(8), -100), *DATA[:7]]
        run.loader(ignored, global_batch=8)
        model = nn.Linear(8, 3)

        def own_step(model, batch):
            return LOSS(model(batch[0]), batch[1])

        run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), step=own_step)
        assert run.evaluate(ignored, batch=1).loss == pytest.approx(run.evaluate(DATA[:7]).loss, rel=1e-6)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(DATA)


def test_a_stream_trains_and_is_evaluated():
    """A loader without a length is one all the same."""
    with shoal.Run() as run:
        loader = run.loader(Stream(), global_batch=8)
        set_up(run, data=loader)
        assert len([run.step(batch).loss for batch in loader]) == 4
        assert run.evaluate(Stream()).samples == len(list(Stream()))
        assert run.evaluate(DATA).samples == len(DATA)


def test_a_loss_that_is_no_mean_is_told_of_where_a_step_adds_parts(capsys):
    with shoal.Run() as run:
        run.loader(DATA, global_batch=8, micro_batch=4)
        for reduction in ("mean", "sum"):
            model = nn.Linear(8, 3)
            run.setup(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=nn.CrossEntropyLoss(reduction=reduction))
            assert ("not the mean over its items" in capsys.readouterr().err) == (reduction == "sum")


def test_an_evaluation_makes_batches_as_the_loader_does():
    """The collate function of the first loader is used for a dataset, and samples are weighed as in training."""

    def collate(samples):
        return torch.stack([one[0] for one in samples]) / 100, torch.tensor([one[1] for one in samples])

    with shoal.Run() as run:
        loader = run.loader(DATA, global_batch=8, collate_fn=collate)
        set_up(run)
        assert run.evaluate(DATA).loss == run.evaluate(loader).loss < 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"plan": 2}, "plan=2 is no plan"),
        ({"plan": "dp=x"}, "dp"),
        ({"resume": True}, "give run_dir="),
        ({"precision": "fp16"}, "precision"),
        ({"batch_norm": "x"}, "batch_norm"),
        ({"seed": "a"}, "seed"),
        ({"run_dir": __file__}, "cannot be made"),
        ({"run_dir": 3}, "run_dir=3 is no path"),
        ({"plan": shoal.Plan(dp="2")}, "a value of another type"),
        ({"threads": 0}, "threads=0 is no number"),
        ({"deadline": "10s"}, "deadline='10s' is no number of seconds"),
        ({"hooks": [shoal.EMA]}, "the class EMA itself"),
        ({"loggers": "tensorboard"}, r"loggers= is a list, and was given 'tensorboard'"),
        ({"checkpoint": {"evry": 2}}, r"shoal\.Run\(checkpoint=\): unknown key 'evry'"),
        ({"telemetry": {"x": 1}}, r"shoal\.Run\(telemetry=\): unknown key 'x'"),
        ({"replicas": [1]}, r"shoal\.Run\(replicas=\) is a dict of settings or a ReplicaConfig"),
    ],
)
def test_a_wrong_value_of_a_run_is_one_message(wrong, words):
    with pytest.raises(shoal.RequestError, match=words), shoal.Run(**wrong):
        pass


def test_names_of_other_libraries_say_what_does_the_same_here():
    with shoal.Run() as run:
        for name, fix in (
            ("backward", r"run\.forward_backward\(batch\)"),
            ("prepare", r"run\.setup"),
            ("state_dikt", "did you mean 'state_dict'"),
        ):
            with pytest.raises(AttributeError, match=fix):
                getattr(run, name)
        assert not hasattr(run, "nothing_like_it")


def test_checkpoints_are_written_by_themselves_every_so_many_steps(tmp_path):
    """``checkpoint.every`` means in a script what it means in a recipe, also after a resume, and nothing is written twice."""
    for resume, wanted in ((False, [0, 0, 1, 1]), (True, [2, 2, 3, 3])):
        settings = {"every": 2, "keep": 9, "background": False}
        with shoal.Run(run_dir=tmp_path, resume=resume, checkpoint=settings) as run:
            loader = run.loader(DATA, global_batch=8)
            set_up(run)
            found = []
            for batch in loader.steps(4):
                found.append(len(list((tmp_path / "checkpoints").glob("step-*"))))
                run.step(batch)
        assert found == wanted
    names = sorted(one.name for one in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000004", "step-00000006", "step-00000008"]
    assert (tmp_path / "events" / "rank-000.jsonl").read_text().count('"checkpoint_saved"') == 4

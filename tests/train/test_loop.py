"""Training from end to end on the tiny target: it learns, it stops, it continues to the bit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headway.data.capture import capture
from headway.data.dialogs import Dialog, DialogWriter
from headway.heads.common.checkpoint import load_head, read_config
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, LossReport
from headway.heads.medusa import Head as Medusa
from headway.inference import target as target_module
from headway.inference.target import Target
from headway.train import loop, setup
from headway.train.config import TrainConfig
from headway.train.loop import Interrupted, train
from headway.train.run_folder import RunFolder
from headway.train.train_heads import main
from tests.tiny import build, target
from tests.train.conftest import write_dialogs
from tests.train.runs import interrupted_in_step, log_of, same, weights

ROOT = Path(__file__).resolve().parents[2]
Make = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("family", "head"),
    [("medusa", {"num_heads": 2, "draft_vocab_size": 64}), ("eagle3", {"steps": 2, "draft_vocab_size": 64})],
)
def test_a_run_learns_and_leaves_a_head(recipe: Make, tiny: Target, family: str, head: dict[str, Any]) -> None:
    config = recipe(family=family, head=head, max_steps=40, eval_every=20, lr=3e-3)
    metrics = train(config, target=tiny, argv=["recipe.yaml"])
    rows = log_of(config)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert sum(losses[-10:]) < sum(losses[:10])
    assert [row["step"] for row in rows if "held_out_loss" in row] == [20, 40]
    assert metrics["steps"] == 40
    assert metrics["accepted_length"] >= 1.0
    assert metrics["accepted_prompts"] == 2
    assert metrics["skipped_batches"] == 0
    saved = read_config(config.out + "/head")
    assert saved["metrics"] == json.loads(json.dumps(metrics))
    assert saved["data"]["dialogs"] == 16
    assert saved["data"]["held_out"] == 3
    assert load_head(config.out + "/head", tiny).config.taps
    run = json.loads((Path(config.out) / "run.json").read_text())
    assert run["recipe"]["lr"] == 3e-3
    assert run["argv"] == ["recipe.yaml"]
    assert run["dialogs"]["target"] == "tiny"
    assert run["total_steps"] == 40
    assert sorted(p.name for p in (Path(config.out) / "state").iterdir()) == ["step-38", "step-40"]


def test_the_target_is_not_touched(recipe: Make, tiny: Target) -> None:
    before = {name: tensor.clone() for name, tensor in tiny.model.state_dict().items()}
    train(recipe(), target=tiny)
    assert same(before, tiny.model.state_dict())
    assert all(p.grad is None for p in tiny.model.parameters())


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_keeping_features_changes_nothing(recipe: Make, tiny: Target, tmp_path: Path, cache: str) -> None:
    off = recipe(cache="off", out=str(tmp_path / "off"), max_steps=None, epochs=3)
    on = recipe(cache=cache, out=str(tmp_path / "on"), max_steps=None, epochs=3)
    train(off, target=tiny)
    train(on, target=tiny)
    assert same(weights(off), weights(on))
    assert not (tmp_path / "on" / "cache").exists()


def test_eight_bits_train_alike_wherever_they_are_kept(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    made = {}
    for name, changes in {
        "off": {"cache": "off"},
        "memory": {"cache": "memory"},
        "disk": {"cache": "disk"},
        "whole": {"store": "bfloat16"},
    }.items():
        config = recipe(out=str(tmp_path / name), **({"store": "int8", "max_steps": None, "epochs": 2} | changes))
        train(config, target=tiny)
        made[name] = weights(config)
    assert same(made["off"], made["memory"])
    assert same(made["off"], made["disk"])
    assert not same(made["off"], made["whole"])


def test_a_target_with_a_device_of_its_own_trains_the_same_head(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    beside, apart = (
        recipe(out=str(tmp_path / name), target_device=device, eval_every=2, grad_accum=2, family="eagle3", head={})
        for name, device in (("beside", None), ("apart", "cpu"))
    )
    assert train(beside, target=tiny)["accepted_length"] == train(apart, target=tiny)["accepted_length"]
    assert same(weights(beside), weights(apart))


def test_captured_features_are_read_and_those_asked_for_must_fit(
    recipe: Make, tiny: Target, tmp_path: Path, dialogs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "captured")
    config = recipe(features=folder, store="int8", family="eagle3", head={"steps": 2, "draft_vocab_size": 64})
    with pytest.raises(HeadwayError, match="none were recorded; make them with `headway capture`"):
        train(config, target=tiny)
    capture(tiny, dialogs, (0, 1, 3, "last"), out=folder, store="int8", show=False)
    assert not Path(config.out).exists()
    train(config, target=tiny)
    assert "of 16 dialogs, made in float32, kept in int8, read instead of computed" in capsys.readouterr().err
    with pytest.raises(HeadwayError, match=r"of taps \[0, 1, 3, 'last'\], not of all of \[2\]"):
        train(recipe(features=folder, out=str(tmp_path / "other"), head={"taps": (2,)}), target=tiny)


def test_a_run_is_not_continued_on_other_weights(recipe: Make, tiny: Target) -> None:
    config = recipe()
    train(config, target=tiny)
    shutil.rmtree(Path(config.out) / "head")
    with pytest.raises(HeadwayError, match="holds a run on tiny with weights"):
        train(config, target=target(build(1, num_hidden_layers=4), mode="tree"))
    run = json.loads((Path(config.out) / "run.json").read_text())
    del (
        run["weights"],
        run["recipe"]["store"],
        run["recipe"]["features"],
    )  # as a run from before there were these has it
    (Path(config.out) / "run.json").write_text(json.dumps(run))
    train(config, target=tiny)


def test_another_seed_is_another_run(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    a, b, c = (recipe(seed=s, out=str(tmp_path / f"{i}")) for i, s in enumerate([1, 1, 2]))
    for config in (a, b, c):
        train(config, target=tiny)
    assert same(weights(a), weights(b))
    assert not same(weights(a), weights(c))


def save_target(tiny: Target, folder: Path) -> None:
    tiny.model.save_pretrained(folder)
    assert tiny.tokenizer is not None
    tiny.tokenizer.save_pretrained(folder)


def test_kill_and_continue_is_bit_identical(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    save_target(tiny, tmp_path / "tiny")
    changes: dict[str, Any] = {"target": str(tmp_path / "tiny"), "max_steps": None, "epochs": 60, "grad_accum": 2}
    changes |= {"eval_prompts": 0, "lr": 1e-3}
    whole, cut = (recipe(**changes, out=str(tmp_path / name)) for name in ("whole", "cut"))
    path = tmp_path / "cut.yaml"
    path.write_text(yaml.safe_dump(cut.to_json()))
    command = [sys.executable, str(ROOT / "train" / "train_heads.py"), str(path)]
    child = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)
    state = tmp_path / "cut" / "state"
    deadline = time.monotonic() + 60
    while child.poll() is None and not any(state.glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(child.pid, signal.SIGKILL)
    _, errors = child.communicate()
    steps = sorted(int(p.name.removeprefix("step-")) for p in state.glob("step-*"))
    total = json.loads((tmp_path / "cut" / "run.json").read_text())["total_steps"]
    assert steps, errors.decode()
    assert 0 < steps[-1] < total
    shutil.copytree(tmp_path / "cut", tmp_path / "forgetful")

    loaded = Target.load(tmp_path / "tiny")
    train(cut, target=loaded)
    train(whole, target=loaded)
    assert same(weights(cut), weights(whole))
    a, b = ({r["step"]: (r["loss"], r["lr"]) for r in log_of(c) if "lr" in r} for c in (cut, whole))
    assert a == b
    assert list(a) == list(range(1, total + 1))

    # The comparison would see a resume that forgets the optimizer.
    forgetful = recipe(**changes, out=str(tmp_path / "forgetful"))
    for file in (tmp_path / "forgetful" / "state").glob("*/optimizer.pt"):
        rest = torch.load(file, weights_only=True)
        for moments in rest["optimizer"]["state"].values():
            moments["exp_avg"].zero_()
        torch.save(rest, file)
    train(forgetful, target=loaded)
    assert not same(weights(forgetful), weights(whole))


def test_ctrl_c_saves_and_the_same_call_continues(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    whole, cut = recipe(out=str(tmp_path / "whole")), recipe(out=str(tmp_path / "cut"), save_every=0)
    train(whole, target=tiny)
    with interrupted_in_step(3, Medusa), pytest.raises(Interrupted, match="stopped at step 3 of 6"):
        train(cut, target=tiny)
    assert not (tmp_path / "cut" / "head").exists()
    train(cut, target=tiny)
    assert same(weights(cut), weights(whole))


@pytest.mark.parametrize("signals", ["SIGINT SIGTERM SIGTERM", "SIGINT SIGINT", "SIGTERM"])
def test_what_a_launcher_makes_of_ctrl_c_saves_too(recipe: Make, tiny: Target, signals: str) -> None:
    """accelerate hands a SIGTERM on beside the terminal's SIGINT, torchrun another SIGINT, a scheduler SIGTERM alone."""
    config = recipe(save_every=0)
    sent = [signal.Signals[name] for name in signals.split()]
    with interrupted_in_step(3, Medusa, sent), pytest.raises(Interrupted, match="stopped at step 3 of 6"):
        train(config, target=tiny)
    assert (Path(config.out) / "state" / "step-3").is_dir()


def test_ctrl_c_again_stops_at_once(recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "ECHO", 0.0)
    config = recipe(save_every=0)
    with interrupted_in_step(3, Medusa, [signal.SIGINT] * 2), pytest.raises(KeyboardInterrupt) as stopped:
        train(config, target=tiny)
    assert not isinstance(stopped.value, Interrupted)


def test_one_process_speaks_of_ctrl_c(
    recipe: Make, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for is_main, said in ((True, 1), (False, 0)):
        with loop.interruptible(is_main):
            signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err.count("finishing the step") == said

    def stopped(*given: Any, **named: Any) -> None:
        raise Interrupted("stopped at step 3 of 6")

    monkeypatch.setattr(loop, "train", stopped)
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe().to_json()))
    for rank, said in (("0", 1), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        assert main([str(file)]) == 130
        assert capfd.readouterr().err.count("stopped at step 3") == said


def test_a_finished_run_is_left_as_it_is(recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe()
    metrics = train(config, target=tiny)
    monkeypatch.setattr(loop, "prepare", None)
    assert train(config, target=tiny) == json.loads(json.dumps(metrics))


def test_another_recipe_or_other_dialogs_do_not_continue_a_run(recipe: Make, tiny: Target, dialogs: Path) -> None:
    config = recipe()
    train(config, target=tiny)
    with pytest.raises(HeadwayError, match=r"holds a run with lr 0\.01, the recipe now says 0\.02"):
        train(recipe(lr=0.02), target=tiny)
    with pytest.raises(HeadwayError, match=r"head\.num_heads 2, the recipe now says 3"):
        train(recipe(head={"num_heads": 3, "draft_vocab_size": 64}), target=tiny)
    lines = (dialogs / "dialogs.jsonl").read_text().splitlines(keepends=True)
    (dialogs / "dialogs.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(HeadwayError, match="other dialogs"):
        train(config, target=tiny)


def test_a_damaged_state_is_named(recipe: Make, tiny: Target) -> None:
    config = recipe()
    train(config, target=tiny)
    shutil.rmtree(Path(config.out) / "head")
    for name in ("optimizer.pt", "head.safetensors", "state.json"):
        file = Path(config.out) / "state" / "step-6" / name
        before = file.read_bytes()
        file.write_bytes(before[: len(before) // 2])
        with pytest.raises(HeadwayError, match=name.replace(".", r"\.")):
            train(config, target=tiny)
        file.write_bytes(before)


def test_a_file_that_is_no_state_or_run_is_named(recipe: Make, tiny: Target) -> None:
    config = recipe()
    train(config, target=tiny)
    shutil.rmtree(Path(config.out) / "head")
    (Path(config.out) / "state" / "step-6" / "optimizer.pt").write_bytes(bytes(5000))
    with pytest.raises(HeadwayError, match=r"optimizer\.pt is damaged"):
        train(config, target=tiny)
    for text in ("", "{", "{}", "[]"):
        (Path(config.out) / "run.json").write_text(text)
        with pytest.raises(HeadwayError, match=r"run\.json"):
            train(config, target=tiny)


def test_an_evaluation_that_ctrl_c_left_out_is_made_up(
    recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(eval_every=2, max_steps=8)
    real_loss, real_length, calls = Medusa.loss, loop.evaluate_accepted_length, []

    def loss(self: Medusa, batch: Batch) -> LossReport:
        calls.append(self.training)
        if self.training and calls.count(True) == 4:
            signal.raise_signal(signal.SIGINT)  # in a step after which an evaluation is due
        return real_loss(self, batch)

    def accepted(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGINT)  # and in the midst of one
        return real_length(*given, **named)

    monkeypatch.setattr(Medusa, "loss", loss)
    with pytest.raises(Interrupted):
        train(config, target=tiny)
    monkeypatch.setattr(Medusa, "loss", real_loss)
    monkeypatch.setattr(loop, "evaluate_accepted_length", accepted)
    with pytest.raises(Interrupted):
        train(config, target=tiny)
    monkeypatch.setattr(loop, "evaluate_accepted_length", real_length)
    train(config, target=tiny)
    rows = [row for row in log_of(config) if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [2, 4, 6, 8]
    assert all(row["accepted_prompts"] == 2 for row in rows)


def test_dialogs_of_another_vocabulary_are_refused(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    for size in (271, 273):
        folder = write_dialogs(tmp_path / f"of-{size}", vocab_size=size)
        with pytest.raises(HeadwayError, match=f"{size} token ids"):
            train(recipe(dialogs=str(folder), out=str(tmp_path / "x")), target=tiny)
    assert not (tmp_path / "x").exists()


def test_places_that_cannot_be_read_or_written_are_refused_first(recipe: Make, tmp_path: Path, dialogs: Path) -> None:
    (tmp_path / "file").write_text("")
    for changes, named in (
        ({"dialogs": str(dialogs / "dialogs.jsonl")}, "is a file"),
        ({"out": str(tmp_path / "file")}, "is not a folder that can be written"),
        ({"out": str(tmp_path / "file" / "run")}, "is not a folder that can be written"),
    ):
        with pytest.raises(HeadwayError, match=named):
            train(recipe(**changes))  # no target: it is not loaded


def test_a_run_goes_on_with_its_dtype_and_its_batches(
    recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tiny, tmp_path / "tiny")
    config = recipe(dtype="auto", target=str(tmp_path / "tiny"))
    timed = []
    monkeypatch.setattr(
        target_module, "fast_dtype", lambda *given, training: timed.append((*given, training)) or "float32"
    )
    train(config)
    assert timed == [("cpu", config.tokens_per_batch, True)]
    shutil.rmtree(Path(config.out) / "head")
    monkeypatch.setattr(target_module, "fast_dtype", lambda *given, training: "bfloat16")
    train(config)
    assert read_config(config.out + "/head")["dtype"] == "float32"
    run = json.loads((Path(config.out) / "run.json").read_text())
    assert (run["dtype"], run["batches_per_step"]) == ("float32", 1)
    before = {**run, "processes": 2}  # as it was written before it said how many batches a step has
    del before["batches_per_step"]
    (Path(config.out) / "run.json").write_text(json.dumps(before))
    shutil.rmtree(Path(config.out) / "head")
    capsys.readouterr()
    train(config)
    assert "2 batches a step on 1 process" in capsys.readouterr().err


def test_a_folder_of_something_else_is_left_alone(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="is not empty and holds no run"):
        train(recipe(out=str(tmp_path)), target=tiny)


@pytest.mark.parametrize("where", ["loss", "gradient norm"])
def test_a_loss_that_is_not_finite_stops_before_the_step(
    recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    real, seen = Medusa.loss, []

    def loss(self: Medusa, batch: Batch) -> LossReport:
        report = real(self, batch)
        seen.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        if len(seen) == 4:
            seen.append(self)
            if where == "loss":
                report.loss = report.loss * float("nan")
            else:
                parameter = next(self.parameters())
                report.loss = (
                    report.loss + (parameter * float("inf")).sum().clamp(0, 0).nan_to_num() * 0 + Nan.apply(parameter)
                )
        return report

    monkeypatch.setattr(Medusa, "loss", loss)
    with pytest.raises(HeadwayError, match=f"the {where} is nan at step 4"):
        train(recipe(), target=tiny)
    assert same(seen[3], seen[4].state_dict())


class Nan(torch.autograd.Function):
    """Zero, with a gradient that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(ctx.saved_tensors[0], float("nan"))


def test_a_batch_without_goals_is_skipped_and_counted(
    recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = Medusa.loss, []

    def loss(self: Medusa, batch: Batch) -> LossReport:
        seen.append({name: tensor.clone() for name, tensor in self.state_dict().items()})
        if len(seen) == 3:
            batch.supervised_BT = torch.zeros_like(batch.supervised_BT)
        return real(self, batch)

    monkeypatch.setattr(Medusa, "loss", loss)
    metrics = train(recipe(weight_decay=0.1), target=tiny)
    assert metrics["skipped_batches"] == 1
    assert same(seen[2], seen[3])
    assert not same(seen[1], seen[2])


def test_a_time_budget_fixes_the_number_of_steps_once(
    recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = recipe(out=str(tmp_path / "plain"), max_steps=5)
    timed = recipe(out=str(tmp_path / "timed"), max_steps=None, max_seconds=1000)
    real = setup.steps_by_time

    def steps_by_time(config: TrainConfig, features: Any, trial: Any) -> int:
        assert real(config, features, trial) > 100
        return 5

    monkeypatch.setattr(setup, "steps_by_time", steps_by_time)
    train(plain, target=tiny)
    train(timed, target=tiny)
    assert json.loads((tmp_path / "timed" / "run.json").read_text())["total_steps"] == 5
    assert same(weights(plain), weights(timed))  # the trials left no trace


def test_the_command(tmp_path: Path, dialogs: Path, tiny: Target, capsys: pytest.CaptureFixture[str]) -> None:
    save_target(tiny, tmp_path / "tiny")
    recipe = str(ROOT / "recipes" / "tiny" / "medusa.yaml")
    given = [f"target={tmp_path / 'tiny'}", f"dialogs={dialogs}", f"out={tmp_path / 'run'}", "max_steps=2"]
    assert main([recipe, *given]) == 0
    assert (tmp_path / "run" / "head" / "model.safetensors").is_file()
    assert "head saved in" in capsys.readouterr().err
    for bad, named in [
        ([recipe, *given, "learnin_rate=1"], "unknown key learnin_rate"),
        ([recipe, *given, "head.num_headz=1", "out=x"], "did you mean head.num_heads"),
        ([str(tmp_path / "none.yaml")], "no recipe"),
        ([recipe, *given, "dialogs=nowhere", f"out={tmp_path / 'other'}"], "nowhere"),
        ([recipe, *given, "tree=chain:9", f"out={tmp_path / 'other'}"], "depth 9"),
        ([recipe, *given, "head.draft_vocab_size=265", f"out={tmp_path / 'other'}"], "265"),
    ]:
        assert main(bad) == 2
        err = capsys.readouterr().err.strip().splitlines()[-1]
        assert err.startswith("error: ")
        assert named in err
    assert not (tmp_path / "other").exists()
    assert main([]) == 2
    assert main(["--help"]) == 0


@pytest.mark.slow
def test_two_processes_train_one_head(tmp_path: Path, dialogs: Path, tiny: Target) -> None:
    save_target(tiny, tmp_path / "tiny")
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "recipes" / "accelerate" / "cpu.yaml"), "--main_process_port", "0"]
    command += [str(ROOT / "train" / "train_heads.py"), str(ROOT / "recipes" / "tiny" / "eagle3.yaml")]
    command += [f"target={tmp_path / 'tiny'}", f"dialogs={dialogs}", f"out={tmp_path / 'run'}", "max_steps=3"]
    command += ["tracker=tensorboard"]  # which is ended on one process while the other waits
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("head saved in") == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "lr" in row] == [1, 2, 3]
    load_head(tmp_path / "run" / "head", Target.load(tmp_path / "tiny"))


def test_dialogs_are_cut_to_the_context_of_the_target(recipe: Make, tmp_path: Path) -> None:
    short = target(build(0, model_type="gpt2", max_position_embeddings=16, num_hidden_layers=4), mode="tree")
    assert short.max_positions == 16
    folder = tmp_path / "long"
    with DialogWriter(folder, {"target": "tiny", "vocab_size": 272}) as writer:
        for i in range(8):
            writer.add(Dialog(f"{i}", [259, *range(97, 97 + 22)], [(2, 23)], "stop"))
    metrics = train(recipe(dialogs=str(folder), eval_prompts=0), target=short)
    assert metrics["steps"] == 6


def test_a_run_that_another_process_works_on_is_refused(recipe: Make, tiny: Target) -> None:
    config = recipe()
    train(config, target=tiny)
    shutil.rmtree(Path(config.out) / "head")
    other = RunFolder(config.out)
    other.hold()
    with pytest.raises(HeadwayError, match="another process"):
        train(config, target=tiny)
    other.release()
    train(config, target=tiny)
    assert (Path(config.out) / "head").is_dir()

"""Steps of several batches, several processes, other engines, other numbers of processes: the head is always the same."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.heads.common.checkpoint import load_head
from headway.heads.common.errors import HeadwayError
from headway.inference.target import Target
from headway.train import launch, loop, setup
from headway.train.config import TrainConfig
from headway.train.loop import train
from tests.train import processes
from tests.train.runs import log_of, weights

MUON = "muon" if hasattr(torch.optim, "Muon") else "adamw"
Make = Callable[..., TrainConfig]
EAGLE3: dict[str, Any] = {"family": "eagle3", "head": {"steps": 2, "draft_vocab_size": 64}, "lr": 1e-3}
SHORT: dict[str, Any] = {**EAGLE3, "max_steps": 4, "eval_prompts": 1, "eval_tokens": 4, "supervise": "all"}


class CrashError(Exception):
    """Ends a run as a crash would."""


def part_of(config: TrainConfig, target: Target, step: int = 2) -> None:
    """Do a run until it has saved its state of a step."""
    real = loop.save_state

    def save_state(run: Any) -> None:
        real(run)
        if run.progress.step == step:
            raise CrashError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "save_state", save_state)
        with pytest.raises(CrashError):
            train(config, target=target)


@pytest.fixture
def make(recipe: Make, tmp_path: Path) -> Make:
    return lambda name, **changes: recipe(**(SHORT | changes), out=str(tmp_path / name))


def losses(config: TrainConfig) -> list[float]:
    rows = [row for row in log_of(config) if "lr" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    return [row["loss"] for row in rows]


def assert_same(a: TrainConfig, b: TrainConfig) -> None:
    """The losses are compared number by number, the weights as a whole: a gradient that is all rounding moves its weight in
    Adam as far as any other."""
    assert losses(a) == pytest.approx(losses(b), abs=1e-5)
    one, other = weights(a), weights(b)
    assert {name: t.shape for name, t in one.items()} == {name: t.shape for name, t in other.items()}
    apart = torch.cat([(one[name].double() - other[name].double()).flatten() for name in other])
    size = torch.cat([t.double().flatten() for t in other.values()])
    assert float(apart.norm()) < 2e-4 * float(size.norm())


def test_a_step_of_several_batches_is_that_of_one_large_batch(
    make: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches differ in length, and with `all` the draft steps of a batch in their number of goals."""
    large, small = make("large", tokens_per_batch=100_000), make("small", tokens_per_batch=48, grad_accum=5)
    train(large, target=tiny)
    train(small, target=tiny)
    assert_same(small, large)
    monkeypatch.setattr(loop, "count_labels", lambda *given: None)  # negative control: no batch learns of the others
    alone = make("alone", tokens_per_batch=48, grad_accum=5)
    train(alone, target=tiny)
    with pytest.raises(AssertionError):
        assert_same(alone, large)


def test_two_processes_train_the_head_of_one_and_their_state_goes_on_with_any_number(make: Make, tiny: Target) -> None:
    """Muon, the average and a falling rate go on too."""
    changes: dict[str, Any] = {"optimizer": MUON, "ema": 0.9, "schedule": "wsd", "cooldown": 2}
    one, two = make("one", grad_accum=2, **changes), make("two", **changes)
    two_to_one, one_to_two = make("2-to-1", **changes), make("1-to-2", grad_accum=2, **changes)
    train(one, target=tiny)
    part_of(one_to_two, tiny)

    def pair() -> None:
        train(two, target=tiny)
        part_of(two_to_one, tiny)
        train(one_to_two, target=tiny)

    processes.run(2, pair)
    train(two_to_one, target=tiny)
    for config in (two, two_to_one, one_to_two):
        assert_same(config, one)
    assert load_head(Path(two.out) / "head", tiny).config.taps


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "peagle", "head": {"depths": 3, "draft_vocab_size": 64}},
        {"family": "eagle", "head": {"noise": 0.2}},
        {"family": "eagle", "head": {"noise": 0.2}, "grad_accum": 1},
    ],
    ids=["anchors", "noise", "one batch"],
)
def test_what_is_drawn_does_not_depend_on_the_processes(make: Make, tiny: Target, changes: dict[str, Any]) -> None:
    """A step of three batches leaves one of two processes without any in the last turn; one of one, from the beginning."""
    changes = {"grad_accum": 3, **changes}
    whole, cut = make("whole", **changes), make("cut", **changes)
    train(whole, target=tiny)
    part_of(cut, tiny)
    processes.run(2, lambda: train(cut, target=tiny))
    assert_same(cut, whole)


def test_a_process_that_is_killed_is_started_again_and_the_run_ends_the_same(
    make: Make, tiny: Target, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole, killed = make("whole", grad_accum=2), make("killed", save_every=1)
    train(whole, target=tiny)
    marker = tmp_path / "killed once"
    real = loop.summarise

    def summarise(accelerator: Any, *given: Any) -> Any:
        if accelerator.process_index == 1 and (Path(killed.out) / "state" / "step-2").is_dir() and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return real(accelerator, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "summarise", summarise)
        processes.run_elastic(2, lambda: train(killed, target=tiny), max_restarts=1)
    assert marker.exists()
    assert "continuing after step 2" in capfd.readouterr().err
    assert_same(killed, whole)


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [("one", "", 1), ("cpu", "multi_gpu", 2), ("ddp", "multi_gpu", 8), ("fsdp2", "use_fsdp", 8)]
    + [(name, "use_deepspeed", 8) for name in ("zero2", "zero3")],
)
def test_accelerate_reads_the_configs(name: str, kind: str, number: int) -> None:
    args = processes.read_config(name)
    kinds = ("multi_gpu", "use_fsdp", "use_deepspeed")
    assert [k for k in kinds if getattr(args, k)] == ([kind] if kind else [])
    assert (args.num_processes, args.mixed_precision) == (number, "no")
    assert bool(args.use_cpu) == (name == "cpu")
    if kind == "use_deepspeed":
        assert processes.environment(name)["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[-1]
    head = (processes.CONFIGS / f"{name}.yaml").read_text().splitlines()[0]
    assert f"accelerate launch --config_file recipes/accelerate/{name}.yaml train/train_heads.py" in head


def test_every_config_is_checked() -> None:
    assert {path.stem for path in processes.CONFIGS.iterdir()} == {"one", "cpu", "ddp", "fsdp2", "zero2", "zero3"}


def test_a_target_split_over_processes(make: Make, tiny: Target) -> None:
    whole, split = make("whole", grad_accum=2), make("split", shard_target=True, eval_every=2)
    train(whole, target=tiny)

    def halves() -> None:
        before = {name: p.numel() for name, p in tiny.model.named_parameters()}
        train(split, target=tiny)
        for name, p in tiny.model.named_parameters():
            local = p.to_local().numel() if hasattr(p, "to_local") else p.numel()
            assert local * (2 if ".layers." in name else 1) == before[name], name

    processes.run(2, halves)
    assert_same(split, whole)
    assert load_head(Path(split.out) / "head", tiny).config.taps
    with pytest.raises(HeadwayError, match="this is one"):
        train(make("alone", shard_target=True), target=tiny)


@pytest.mark.parametrize(
    "engine",
    ["fsdp2", pytest.param("zero2", marks=pytest.mark.slow), pytest.param("zero3", marks=pytest.mark.slow)],
)
def test_engines_train_the_same_head_and_take_up_and_leave_one_another_s_state(
    make: Make, tiny: Target, engine: str
) -> None:
    if engine != "fsdp2":
        pytest.importorskip("deepspeed")
    changes = {"grad_accum": 4, "ema": 0.9, "optimizer": MUON if engine == "fsdp2" else "adamw"}
    plain, split, back = make("plain", **changes), make("split", **changes, save_every=1), make("back", **changes)
    train(plain, target=tiny)
    part_of(split, tiny, 1)

    def halves() -> None:
        part_of(split, tiny, 3)
        if os.environ["RANK"] == "0":
            shutil.copytree(split.out, back.out)

    processes.run(2, halves, engine)
    processes.run(2, lambda: train(split, target=tiny), engine)
    train(back, target=tiny)
    assert_same(split, plain)
    assert_same(back, plain)
    for file in ("head", "average"):
        shapes = [
            {n: t.shape for n, t in weights(c, f"state/step-4/{file}.safetensors").items()} for c in (split, plain)
        ]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize(
    ("config", "changes", "recipe_changes", "named"),
    [
        ("fsdp2", {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {}, "NO_WRAP"),
        ("fsdp2", {"ACCELERATE_MIXED_PRECISION": "bf16"}, {}, "mixed_precision is bf16"),
        ("fsdp2", {}, {"init_from": "head", "lora": {}}, "a lora is too small"),
        ("cpu", {"ACCELERATE_USE_FSDP": "true"}, {}, "gave"),
    ],
)
def test_launches_that_are_refused(
    make: Make, config: str, changes: dict[str, str], recipe_changes: dict[str, Any], named: str
) -> None:
    def refused() -> None:
        with pytest.raises(HeadwayError, match=named):
            setup.make_accelerator(make("refused", **recipe_changes))

    processes.run(1, refused, config, **changes)


def test_fsdp1_is_refused() -> None:
    with pytest.raises(HeadwayError, match="fsdp_version: 2"):
        launch._check_fsdp(SimpleNamespace(is_fsdp2=False, state=SimpleNamespace(fsdp_plugin=None)))  # type: ignore[arg-type]


def test_a_split_target_is_timed_by_nobody(make: Make) -> None:
    for changes, named in (
        ({"max_seconds": 9}, "give max_steps and max_seconds=null"),
        ({"target_device": "cpu"}, "leave out target_device"),
    ):
        with pytest.raises(HeadwayError, match=named):
            make("refused", shard_target=True, **changes)

"""Muon, the average of the weights and the loss of a recipe, in whole runs: what they train, save and continue to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, LossReport, families, find_family
from headway.heads.eagle3 import Head as Eagle3
from headway.inference.target import Target
from headway.train import loop
from headway.train.average import Average
from headway.train.config import TrainConfig
from headway.train.loop import Interrupted, train
from headway.train.optimizers import Both, make_optimizer
from tests.train.runs import interrupted_in_step, log_of, same, weights

Make = Callable[..., TrainConfig]
needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
EAGLE3: dict[str, Any] = {
    "family": "eagle3",
    "head": {"steps": 2, "draft_vocab_size": 64},
    "eval_prompts": 0,
    "lr": 3e-3,
}


def losses(config: TrainConfig) -> list[float]:
    return [row["loss"] for row in log_of(config) if "lr" in row]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": "muon", "weight_decay": 0.1}, marks=needs_muon),
        {"ema": 0.9},
        pytest.param({"optimizer": "muon", "ema": 0.9, "schedule": "wsd", "loss": "lk"}, marks=needs_muon),
    ],
    ids=["muon", "ema", "all"],
)
def test_an_interrupted_run_ends_as_a_whole_one(
    recipe: Make, tiny: Target, tmp_path: Path, changes: dict[str, Any]
) -> None:
    whole, cut, forgetful = (recipe(**EAGLE3, **changes, out=str(tmp_path / n)) for n in ("whole", "cut", "forgetful"))
    train(whole, target=tiny)
    with interrupted_in_step(3, Eagle3), pytest.raises(Interrupted):
        train(cut, target=tiny)
    shutil.copytree(cut.out, forgetful.out)
    train(cut, target=tiny)
    assert same(weights(cut), weights(whole))
    assert same(weights(cut, "state/step-6/head.safetensors"), weights(whole, "state/step-6/head.safetensors"))
    assert losses(cut) == losses(whole)

    # The comparison would see a resume that forgets any part.
    state = Path(forgetful.out) / "state" / "step-3"
    if "ema" in changes:
        save_file(
            {k: v.zero_() for k, v in load_file(state / "average.safetensors").items()}, state / "average.safetensors"
        )
    else:
        rest = torch.load(state / "optimizer.pt", weights_only=True)
        for kept in rest["optimizer"]["muon"]["state"].values():
            kept["momentum_buffer"].zero_()
        torch.save(rest, state / "optimizer.pt")
    train(forgetful, target=tiny)
    assert not same(weights(forgetful), weights(whole))


def test_the_average_is_what_is_saved_and_evaluated(
    recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe(**EAGLE3, ema=0.5, eval_every=3)
    seen: list[dict[str, torch.Tensor]] = []
    judged: list[dict[str, torch.Tensor]] = []
    real_loss, real_evaluate = Eagle3.loss, loop.evaluate_agreement

    def copies(head: torch.nn.Module) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in head.named_parameters()}

    def loss(self: Eagle3, batch: Batch) -> LossReport:
        if self.training:
            seen.append(copies(self))
        return real_loss(self, batch)

    def evaluate(head: Eagle3, batches: Any) -> dict[str, Any]:
        judged.append(copies(head))
        return real_evaluate(head, batches)

    monkeypatch.setattr(Eagle3, "loss", loss)
    monkeypatch.setattr(loop, "evaluate_agreement", evaluate)
    train(config, target=tiny)
    last = weights(config, "state/step-6/head.safetensors")
    want = seen[0]
    for step, after in enumerate([*seen[1:], last]):
        decay = min(0.5, (1 + step) / (10 + step))
        want = {name: decay * want[name] + (1 - decay) * after[name] for name in want}
        if step in (2, 5):
            assert all(torch.allclose(judged[step // 3][n], want[n], atol=1e-6) for n in want)
    saved = weights(config)
    assert all(torch.allclose(saved[name], want[name], atol=1e-6) for name in want)
    assert all(not saved[name].equal(last[name]) for name in want)


def test_the_average_leaves_the_weights_as_they_were() -> None:
    layer = torch.nn.Linear(3, 2)
    average, before = Average(layer, 0.9), layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)
    after = layer.weight.detach().clone()
    average.update(layer, 1000)
    with average.instead(layer):
        assert torch.allclose(layer.weight, 0.9 * before + 0.1 * after)
    assert layer.weight.equal(after)
    with pytest.raises(HeadwayError, match="other tensors than the head"):
        average.load({"weight": torch.zeros(2, 4)})


@needs_muon
@pytest.mark.parametrize("family", families())
def test_muon_takes_the_hidden_matrices_alone(recipe: Make, tiny: Target, family: str) -> None:
    config_class, head_class = find_family(family)
    head = head_class(config_class.for_target(tiny.info, draft_vocab_size=64), tiny.frozen)
    optimizer = make_optimizer(recipe(optimizer="muon", weight_decay=0.1), head)
    assert isinstance(optimizer, Both)
    name_of = {id(p): name for name, p in head.named_parameters()}
    of_muon = [name_of[id(p)] for g in optimizer.parts["muon"].param_groups for p in g["params"]]
    of_adamw = [(name_of[id(p)], g["weight_decay"]) for g in optimizer.parts["adamw"].param_groups for p in g["params"]]
    assert sorted(of_muon + [name for name, _ in of_adamw]) == sorted(name_of.values())
    assert all(("lm_head" in name) == (decay > 0) for name, decay in of_adamw)
    shapes = dict(head.named_parameters())
    assert all(shapes[name].ndim == 2 and "lm_head" not in name for name in of_muon)
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    optimizer.load_state_dict(optimizer.state_dict())
    assert {g["lr"] for part in optimizer.parts.values() for g in part.param_groups} == {0.25}
    assert all(a is b for a, b in zip(optimizer.param_groups, optimizer._groups(), strict=True))


@needs_muon
def test_the_trial_steps_of_a_time_budget_leave_no_trace(recipe: Make, tiny: Target, tmp_path: Path) -> None:
    plain = recipe(**EAGLE3, optimizer="muon", ema=0.9, max_steps=3, out=str(tmp_path / "plain"))
    timed = recipe(**EAGLE3, optimizer="muon", ema=0.9, max_steps=3, max_seconds=1000, out=str(tmp_path / "timed"))
    train(plain, target=tiny)
    train(timed, target=tiny)
    assert same(weights(plain), weights(timed))


def test_a_torch_without_muon_is_named(recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    config = recipe(optimizer="muon")
    with pytest.raises(
        HeadwayError, match=r"torch .* does not have; install torch 2\.9 or later, or set optimizer=adamw"
    ):
        train(config)  # no target: it is not loaded
    assert not Path(config.out).exists()


@pytest.mark.parametrize("loss", ["ce", "reverse_kl", "jsd", "tv", "lk:eta=1", "topk:k=8"])
def test_a_run_learns_by_any_loss(recipe: Make, tiny: Target, loss: str) -> None:
    config = recipe(loss=loss, step_weights=[1.0, 0.5], max_steps=12, eval_prompts=0, save_every=0)
    train(config, target=tiny)
    assert sum(losses(config)[-4:]) < sum(losses(config)[:4])


def test_weights_for_other_steps_are_refused_before_anything_is_written(recipe: Make, tiny: Target) -> None:
    config = recipe(step_weights=[1.0, 0.5, 0.25])
    with pytest.raises(HeadwayError, match="step_weights has 3 numbers, the head has 2 steps"):
        train(config, target=tiny)
    assert not Path(config.out).exists()


def test_a_run_from_before_a_key_existed_continues(recipe: Make, tiny: Target) -> None:
    config = recipe()
    train(config, target=tiny)
    path = Path(config.out) / "run.json"
    run = json.loads(path.read_text())
    for key in ("loss", "step_weights", "optimizer", "schedule", "cooldown", "ema"):
        del run["recipe"][key]
    path.write_text(json.dumps(run))
    assert train(config, target=tiny)["steps"] == 6
    with pytest.raises(HeadwayError, match=r"holds a run with ema 0\.0, the recipe now says 0\.9"):
        train(recipe(ema=0.9), target=tiny)

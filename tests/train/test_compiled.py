"""Training that torch.compile takes part in: the same losses, gradients and heads, and what cannot be compiled says so.

What the fast tests compile is traced and then run as it was traced; the slow ones generate code.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.protocol import Batch, Head, families
from headway.heads.medusa import Head as Medusa
from headway.inference.compiled import check_compiler
from headway.inference.target import Target
from headway.train import compiled as module
from headway.train import setup
from headway.train.compiled import Compiled, check_compile, difference
from headway.train.config import TrainConfig
from headway.train.loop import train
from tests.heads.test_contract import make_batch, small
from tests.tiny import build, target
from tests.train import processes
from tests.train.runs import interrupted_in_step, log_of, same, weights

Make = Callable[..., TrainConfig]
FAMILIES = families()
FIELDS: dict[str, dict[str, Any]] = {
    "peagle": {"depths": 2, "num_layers": 1},
    "eagle3": {"steps": 2, "fc_norm": True},
    "eagle": {"noise": 0.1, "steps": 2},
}
FEW = ((24, 17), (30, 11, 9))
"""Lengths of the rows of batches; the lesser of rows and positions changes too."""
MANY = (*FEW, (19,), (12, 12))
NEAR = 1e-3
"""Of weights after some steps: a gradient that is all rounding moves its weight in Adam as far as any other."""
PLAIN = torch.device("cpu")


def loss_and_gradients(head: Head, batch: Batch) -> list[torch.Tensor]:
    """Return loss, losses and agreement by step, and gradients; what the head draws is the same at every call."""
    torch.manual_seed(3)
    head.zero_grad()
    report = head.loss(batch)
    report.loss.backward()
    grads = [p.grad for p in head.parameters() if p.requires_grad]
    assert all(g is not None for g in grads)
    return [report.loss.detach(), report.loss_S, report.agreement_S, *(g.clone() for g in grads if g is not None)]


def batch_of(head: Head, tiny: Target, lengths: Sequence[int], supervised_from: int) -> Batch:
    batch = make_batch(tiny, head.config.taps, lengths, supervised_from)
    # As in training: features are no tensors of inference mode.
    return dataclasses.replace(batch, tap_BTF=batch.tap_BTF.clone(), last_BTD=batch.last_BTD.clone())


def batches(head: Head, tiny: Target, many: bool) -> Iterator[Batch]:
    """Rows and positions of several numbers, with few goals and, of `many`, with nothing but goals too."""
    for lengths in MANY if many else FEW:
        yield batch_of(head, tiny, lengths, min(lengths) - 4)
        if many:
            yield batch_of(head, tiny, lengths, 0)


def check(family: str, tiny: Target, backend: Any, *, many: bool) -> Compiled:
    head = small(family, tiny, **FIELDS.get(family, {})).train()
    compiled = Compiled(family, PLAIN, backend=backend)
    for batch in batches(head, tiny, many):
        head.compiled = None
        want = loss_and_gradients(head, batch)
        head.compiled = compiled
        got = loss_and_gradients(head, batch)
        assert not compiled.reason
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-5)
    return compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_plain_ones(family: str, tiny: Target) -> None:
    assert check(family, tiny, "eager", many=False).num_graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_plain_ones_in_generated_code(family: str, tiny: Target) -> None:
    """A single row, and batches of nothing but goals, have graphs of their own."""
    assert 2 <= check(family, tiny, "inductor", many=True).num_graphs <= 4


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Compile by a backend that generates no code; call it for another one."""

    def use(backend: Any) -> None:
        monkeypatch.setattr(setup, "Compiled", partial(Compiled, backend=backend))

    monkeypatch.setattr(module, "check_compiler", lambda device, without: None)
    use("eager")
    return use


def assert_near(a: TrainConfig, b: TrainConfig) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert not any("_orig_mod" in name for name in one)
    whole = [name for name in one if not one[name].is_floating_point()]  # the draft vocabulary
    assert all(one[name].equal(other[name]) for name in whole)
    real = [name for name in one if name not in whole]
    assert difference([one[name] for name in real], [other[name] for name in real]) < NEAR


@pytest.mark.slow
def test_a_compiled_run_ends_with_the_head_of_a_plain_one(recipe: Make, tiny: Target, tmp_path: Any) -> None:
    changes: dict[str, Any] = {"family": "eagle3", "head": {"steps": 2, "draft_vocab_size": 64}, "lr": 3e-3}
    plain, compiled = recipe(**changes), recipe(**changes, compile=True, out=str(tmp_path / "compiled"))
    check_compiler.cache_clear()
    train(plain, target=tiny)
    metrics = train(compiled, target=tiny)
    assert metrics["compiled"] is True
    assert_near(compiled, plain)


@pytest.mark.usefixtures("traced")
def test_a_run_goes_on_compiled_or_not_to_the_same_head(
    recipe: Make, tiny: Target, tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def part(name: str, compile: bool, **changes: Any) -> TrainConfig:
        return recipe(out=str(tmp_path / name), compile=compile, eval_prompts=0, **changes)

    whole, other = part("whole", False), part("other", False, seed=1)
    train(whole, target=tiny)
    train(other, target=tiny)
    for name, first in (("plain first", False), ("compiled first", True)):
        with interrupted_in_step(3, Medusa), pytest.raises(Interrupted):
            train(part(name, first), target=tiny)
        config = part(name, not first)
        metrics = train(config, target=tiny)
        assert metrics.get("compiled", False) is not first
        assert_near(config, whole)
        with pytest.raises(AssertionError):  # negative control: another seed draws other batches
            assert_near(config, other)
        state = weights(config, "state/step-6/head.safetensors")
        assert state.keys() == weights(whole, "state/step-6/head.safetensors").keys()
    said = capsys.readouterr().err
    assert "compile: torch.compile makes the head's pass in the first steps, which takes long" in said
    assert "compiled the training pass of the medusa head, graph 1, for " in said


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "eagle", "head": {"noise": 0.2, "steps": 1}},
        {"autocast": True},
        {"joint": {"rank": 4, "warmup": 2, "modules": ["q_proj"]}},
    ],
    ids=["noise", "autocast", "joint"],
)
@pytest.mark.usefixtures("traced")
def test_what_else_a_recipe_asks_for(recipe: Make, tmp_path: Any, changes: dict[str, Any]) -> None:
    runs = [recipe(**changes, eval_prompts=0, out=str(tmp_path / str(c)), compile=c) for c in (False, True)]
    for config in runs:
        metrics = train(config, target=target(build(0, num_hidden_layers=4), mode="tree"))
    assert metrics["compiled"] is True
    assert_near(*runs)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("traced")
def test_a_lora_drops_what_it_drops_plainly(
    recipe: Make, tiny: Target, tmp_path: Any, traced: Any, backend: str
) -> None:
    pytest.importorskip("peft")
    traced(backend)
    base = recipe(out=str(tmp_path / "base"), max_steps=1, eval_prompts=0)
    train(base, target=tiny)
    lora = {"head": {}, "init_from": f"{base.out}/head", "lora": {"rank": 4, "dropout": 0.5}, "eval_prompts": 0}
    runs = [recipe(**lora, out=str(tmp_path / str(c)), compile=c) for c in (False, True)]
    for config in runs:
        metrics = train(config, target=tiny)
    assert metrics["compiled"] is True
    assert_near(*runs)


@pytest.mark.usefixtures("traced")
def test_two_processes_compile_each_for_itself(recipe: Make, tiny: Target, tmp_path: Any) -> None:
    runs = [recipe(out=str(tmp_path / str(c)), compile=c, eval_prompts=0) for c in (False, True)]

    def pair() -> None:
        for config in runs:
            metrics = train(config, target=tiny)
        assert metrics["compiled"] is True

    processes.run(2, pair)
    assert_near(*runs)


def test_time_spent_on_compiling_counts_nowhere(recipe: Make, tiny: Target, traced: Any) -> None:
    seconds = 1.5

    def slow(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        time.sleep(seconds)
        return graph.forward

    traced(slow)
    config = recipe(compile=True, eval_prompts=0, max_seconds=seconds)  # less is left after compiling than nothing
    metrics = train(config, target=tiny)
    assert metrics["steps"] == 6
    assert metrics["compile_seconds"] > seconds
    assert metrics["train_seconds"] < seconds / 2
    assert max(row["seconds"] for row in log_of(config)) < seconds / 2


def test_a_pass_that_cannot_be_compiled_says_so_and_trains(
    recipe: Make, tiny: Target, tmp_path: Any, traced: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        raise NotImplementedError("nothing today")

    def wrong(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *given: tuple(out * 1.5 for out in graph.forward(*given))

    plain = recipe()
    train(plain, target=tiny)
    for backend, reason in ((failing, "nothing today"), (wrong, "it differs from the plain one by 0.5")):
        traced(backend)
        config = recipe(compile=True, out=str(tmp_path / backend.__name__))
        metrics = train(config, target=tiny)
        assert reason in metrics["compiled"]
        said = capsys.readouterr().err
        assert said.count("train: the training pass of the medusa head is not compiled and runs as it is: ") == 1
        assert reason in said
        assert same(weights(config), weights(plain))


def test_a_backward_that_fails_for_other_sizes_is_done_plainly(
    tiny: Target, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = set()

    class Fragile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            sizes.add(grad.shape)
            assert len(sizes) <= 2, "sizes never seen"
            return grad

    def fragile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return lambda *given: tuple(Fragile.apply(out) for out in graph.forward(*given))

    head = small("medusa", tiny, num_heads=1).train()
    some = [batch_of(head, tiny, lengths, 6) for lengths in ((24, 17), (20, 17), (20, 17), (18, 12), (9, 9))]
    want = [loss_and_gradients(head, batch) for batch in some]
    head.compiled = compiled = Compiled("medusa", PLAIN, backend=fragile)
    for n, (batch, wanted) in enumerate(zip(some, want, strict=True)):
        torch.testing.assert_close(loss_and_gradients(head, batch), wanted)
        assert bool(compiled.reason) == (n >= 3)
    assert compiled.reason == "AssertionError: sizes never seen"
    assert capsys.readouterr().err.count("is not compiled and runs as it is") == 1


def test_batches_beyond_the_last_graph_run_plainly(
    tiny: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "MOST", 1)
    head = small("hydra", tiny).train()
    several, single = batch_of(head, tiny, (24, 17), 6), batch_of(head, tiny, (19,), 6)
    want = [loss_and_gradients(head, batch) for batch in (several, single, several)]
    head.compiled = compiled = Compiled("hydra", PLAIN, backend="eager")
    for batch, wanted in zip((several, single, several), want, strict=True):
        torch.testing.assert_close(loss_and_gradients(head, batch), wanted)
    assert compiled.num_graphs == 1
    assert not compiled.reason
    assert "has 1 graphs; batches that fit none of them run as they are" in capsys.readouterr().err


def test_evaluation_is_not_compiled(tiny: Target) -> None:
    head = small("medusa", tiny)
    head.compiled = compiled = Compiled("medusa", PLAIN, backend="eager")
    batch = batch_of(head, tiny, (24, 17), 6)
    head.loss(batch)
    with torch.no_grad():
        head.train().loss(batch)
    assert not compiled.num_graphs


def test_the_difference_is_that_of_what_is_furthest_apart() -> None:
    want = [torch.ones(4), torch.ones(100), torch.full((3,), 1e-6)]
    assert difference(want, want) == 0
    assert difference([want[0], want[1] * 1.5, want[2]], want) == pytest.approx(0.5)
    assert difference([*want[:2], want[2] * 2], want) < 1e-4  # beside the others it is nothing
    assert difference([want[0] * torch.nan, *want[1:]], want) != difference(want, want)
    assert difference([*want[:2], None], want) == float("inf")


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_an_engine_that_splits_the_head_is_refused(kind: DistributedType) -> None:
    accelerator: Any = SimpleNamespace(distributed_type=kind, device=PLAIN)
    with pytest.raises(
        HeadwayError, match=f"a head that {kind.value} splits over processes is not compiled; leave out"
    ):
        check_compile(accelerator)


def test_without_a_compiler_nothing_begins(recipe: Make, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no C++ compiler")

    check_compiler.cache_clear()
    monkeypatch.setattr(torch, "compile", none)
    config = recipe(compile=True, target="no such target")
    with pytest.raises(
        HeadwayError, match=r"RuntimeError: no C\+\+ compiler.*g\+\+ or clang\+\+.*or leave out compile"
    ):
        train(config)
    assert not (tmp_path / "run").exists()

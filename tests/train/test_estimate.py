"""Estimates: from a config alone, the figures that a run then has; and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, families, find_family
from headway.heads.medusa import Head as Medusa
from headway.inference.sizes import read_sizes
from headway.inference.target import Target
from headway.train import estimate as module
from headway.train import features as features_module
from headway.train.config import TrainConfig
from headway.train.estimate import estimate, follow_step, lay_out, require_memory
from headway.train.loop import train
from headway.train.train_heads import main
from tests.tiny import build

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
Make = Callable[..., TrainConfig]


@pytest.fixture
def config_only(tmp_path: Path) -> Callable[..., str]:
    """Return a function that writes the folder of a model config, without weights or tokenizer."""

    def write(kind: str = "llama", **fields: Any) -> str:
        AutoConfig.for_model(kind, **fields).save_pretrained(tmp_path / kind)
        return str(tmp_path / kind)

    return write


def test_a_large_target_is_priced_from_its_config(
    recipe: Make, config_only: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ShareGPT dump of case d39: 68 thousand rows of 1300 tokens."""
    for where in (module, features_module):
        monkeypatch.setattr(where, "free_disk", lambda folder: 10**12)
    target = config_only(**LLAMA_8B)
    common: dict[str, Any] = {"target": target, "cache": "disk", "dtype": "bfloat16", "max_steps": None, "epochs": 2}
    given = {"rows": 68_000, "mean_tokens": 1300, "on": "8xH100"}
    eagle3 = estimate(recipe(family="eagle3", head={}, **common), **given)
    assert eagle3.computed
    assert eagle3.target["weights"] == 8_030_261_248
    assert eagle3.memory["target"] == 2 * 8_030_261_248
    assert eagle3.features["bfloat16"] == 2_896_691_200_000
    assert [p for p in eagle3.problems if "cache=disk does not fit" in p]
    medusa = estimate(recipe(head={}, **common), **given)
    assert medusa.features["bfloat16"] == 724_172_800_000
    assert not medusa.problems
    # A pass is 2 operations for each of the 7.0 B weights between embedding and LM head, and attention.
    one = 2 * 6_979_588_096 + 4 * 4096 * 650 * 32 + 2 * 4096 * 128256
    rate = 8 * 989e12 * module.GPU_SHARE
    assert medusa.time["target"] == pytest.approx(68_000 * 1300 * one / rate, rel=1e-6)
    twice = estimate(recipe(head={}, **common | {"cache": "off"}), **given)
    assert twice.time["target"] == pytest.approx(2 * medusa.time["target"], rel=1e-3)
    assert twice.time["head"] == medusa.time["head"]
    half = estimate(recipe(head={}, **common | {"store": "int8"}), **given)
    assert half.disk["features"] < 0.52 * medusa.disk["features"]


def test_a_mixture_is_priced_by_the_experts_that_a_token_visits(config_only: Callable[..., str]) -> None:
    fields = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    fields |= {"intermediate_size": 96, "vocab_size": 100}
    one, all_of_them = (
        read_sizes(config_only("mixtral", **fields, num_local_experts=8, num_experts_per_tok=n)) for n in (1, 8)
    )
    assert one.num_weights == all_of_them.num_weights
    assert all_of_them.num_active - one.num_active == 7 * 2 * 3 * 64 * 96


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    for tied in (True, False):
        model = build(0, num_hidden_layers=3, tie_word_embeddings=tied)
        model.config.save_pretrained(tmp_path)
        sizes = read_sizes(tmp_path)
        assert sizes.num_weights == sum(p.numel() for p in model.parameters())
        assert sizes.num_active == sum(p.numel() for n, p in model.named_parameters() if "layers" in n or "norm" in n)


@pytest.mark.parametrize(
    ("family", "loss"), [*((family, "kl") for family in families()), ("medusa", "jsd"), ("eagle3", "topk:k=8")]
)
def test_the_step_that_is_followed_is_the_step_that_runs(
    recipe: Make, tiny: Target, tmp_path: Path, family: str, loss: str
) -> None:
    """Operations and memory of a head without weights are those of one with them, on real rows."""
    tiny.model.config.save_pretrained(tmp_path / "tiny")
    config = recipe(family=family, head={"draft_vocab_size": 64}, target=str(tmp_path / "tiny"), loss=loss)
    B, T, D = 2, 12, 64
    head = lay_out(config, read_sizes(config.target))
    flops, peak = follow_step(head, B, T, D)
    config_class, head_class = find_family(family)
    real = head_class(config_class.for_target(tiny.info, draft_vocab_size=64), tiny.frozen)
    real.objective = config.objective()
    width = D * len(real.config.taps)
    batch = Batch(
        torch.randint(0, 260, (B, T)),
        torch.full((B,), T),
        torch.ones(B, T, dtype=torch.bool),
        torch.randn(B, T, width),
        torch.randn(B, T, D),
        torch.zeros(B, T),
        torch.zeros(B, T, dtype=torch.long),
    )
    memory = module._Memory()
    with FlopCounterMode(display=False) as counter, memory:
        real.loss(batch).loss.backward()
    # Attention runs as one operation on a CPU and as several without a device.
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.05)
    assert peak == pytest.approx(memory.peak, rel=0.02)
    assert peak > sum(4 * p.numel() for p in real.parameters())  # its gradients
    assert follow_step(head, 2 * B, T, D)[0] > 1.9 * flops


def test_what_the_optimizer_and_the_average_keep_is_counted(
    recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are those of a state on disk, but for its step counters and headers."""
    tiny.model.config.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(module, "product_flops", lambda dtype: 1e8)
    kept = {}
    for optimizer, ema in (("adamw", 0.0), ("muon", 0.0), ("muon", 0.9)):
        if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
            continue
        config = recipe(
            optimizer=optimizer,
            ema=ema,
            target=str(tmp_path / "tiny"),
            out=str(tmp_path / f"{optimizer}-{ema}"),
            max_steps=1,
        )
        kept[optimizer, ema] = estimate(config).memory["head"]
        train(config, target=tiny)
        state = Path(config.out) / "state" / "step-1"
        written = sum(file.stat().st_size for file in state.iterdir() if file.suffix in (".pt", ".safetensors"))
        assert 0 <= written - kept[optimizer, ema] < 25_000
    assert len(set(kept.values())) == len(kept)


def test_the_dialogs_are_counted_where_there_are_some(
    recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.model.config.save_pretrained(tmp_path / "tiny")
    config = recipe(target=str(tmp_path / "tiny"), cache="disk", max_steps=None, epochs=3)
    found = estimate(config)
    metrics = train(config, target=tiny)
    assert found.data["steps"] == metrics["steps"]
    assert not found.data["given"]
    assert found.features["kept"] == "disk"
    with pytest.raises(HeadwayError, match="no dialogs yet; give --rows"):
        estimate(recipe(dialogs=str(tmp_path / "none"), target=config.target))
    monkeypatch.setattr(module, "product_flops", lambda dtype: 1e8)
    for seconds in (1, 100):  # in the first epoch, and long after it
        found = estimate(recipe(max_steps=None, max_seconds=seconds, target=config.target, cache="memory"))
        assert found.time["together"] == pytest.approx(seconds, rel=0.1)
        assert (found.data["trained_positions"] > found.data["positions"]) == (seconds > 1)


def test_a_step_that_cannot_be_followed_is_guessed_and_said(
    recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.model.config.save_pretrained(tmp_path / "tiny")
    config = recipe(target=str(tmp_path / "tiny"))
    assert "could not be followed" not in module.spell(estimate(config))

    def loss(self: Medusa, batch: Batch) -> None:
        batch.tap_BTF.tolist()

    monkeypatch.setattr(Medusa, "loss", loss)
    assert "could not be followed" in module.spell(estimate(config))


def test_the_command(
    recipe: Make, config_only: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.yaml"
    fields = recipe(target=config_only(**LLAMA_8B), dtype="float32", dialogs="none", head={}).to_json()
    path.write_text(json.dumps(fields))
    given = [str(path), "--estimate", "--rows", "100", "--mean-tokens", "50"]
    assert main([*given, "--on", "H200", "dtype=bfloat16"]) == 0
    out = capsys.readouterr().out
    assert "computed from the config, not measured" in out
    assert "8.03 B weights, bfloat16" in out
    assert main([*given, "--json", "--on", "RTX4090"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["computed"]
    assert "memory: " in found["problems"][0]
    for bad, named in (
        ([*given, "--on", "H1000"], "give one of A100"),
        ([*given, "--rows", "0"], "--rows is 0"),
        ([*given[:2], "--mean-tokens", "50"], "give --rows too"),
        ([*given, "--rows", "some"], "--rows"),
        ([*given, "lr=fast"], "lr is 'fast'"),
        ([*given, "target=nowhere/at/all"], "no folder"),
    ):
        assert main(bad) == 2
        assert named in capsys.readouterr().err
    assert not Path(fields["out"]).exists()


def test_what_does_not_fit_is_refused_before_weights_are_read(
    recipe: Make, tiny: Target, config_only: Callable[..., str], monkeypatch: pytest.MonkeyPatch, dialogs: Path
) -> None:
    config = recipe(target=config_only(**LLAMA_8B), head={})
    monkeypatch.setattr(module, "free_memory", lambda: 16 * 2**30)
    with pytest.raises(
        HeadwayError, match=r"takes 29\.92 GiB in float32.*16\.00 GiB of memory are free; use dtype=bfloat16"
    ):
        train(config)  # there are no weights to read
    assert not Path(config.out).exists()
    require_memory(recipe(target=config.target, head={"num_heads": 1}), "bfloat16", "cpu")
    monkeypatch.setattr(module, "free_disk", lambda folder: 1000)
    with pytest.raises(HeadwayError, match="states of this run take"):
        train(recipe(), target=tiny)
    monkeypatch.undo()
    for cache, where in (("memory", "free_memory"), ("disk", "free_disk")):
        with monkeypatch.context() as patch:
            patch.setattr(features_module, where, lambda *given: 1000)
            with pytest.raises(HeadwayError, match=f"cache={cache} does not fit"):
                train(recipe(cache=cache), target=tiny)
    assert not Path(config.out).exists()

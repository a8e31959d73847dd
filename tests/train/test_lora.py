"""Training that begins with a head: all of it, or a LoRA on it, saved merged or kept; and heads for a target with an adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.heads.common.checkpoint import load_head, read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import families, find_family
from headway.inference.adapter import attach
from headway.inference.target import Target
from headway.train.config import make_config
from headway.train.loop import train
from headway.train.lora import add_lora, plain_state
from tests.tiny import build, target
from tests.train.runs import killed_after_step

peft = pytest.importorskip("peft")

FIELDS = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "modules": (), "keep": False}


@pytest.fixture(scope="module")
def base(tiny: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Medusa head to begin with."""
    return save_head(make(tiny), tmp_path_factory.mktemp("base") / "head", target=tiny.info)


def make(tiny: Target) -> Any:
    config, cls = find_family("medusa")
    torch.manual_seed(1)
    head = cls(config.for_target(tiny.info, draft_vocab_size=64, num_heads=2), tiny.frozen)
    head.set_draft_vocab(torch.arange(64) + 60)
    head.warm_start()
    return head.float()


def batch_of(tiny: Target, head: Any) -> Any:
    from headway.heads.common.protocol import Batch

    token_BT = torch.arange(24).view(2, 12) + 70
    length_B = torch.tensor([12, 12])
    return Batch(
        token_BT, length_B, torch.ones_like(token_BT).bool(), *tiny.features(token_BT, length_B, head.config.taps)
    )


def loss_of(head: Any, batch: Any) -> Any:
    torch.manual_seed(2)  # some families draw what they are trained on
    return head.loss(batch)


@pytest.mark.parametrize("family", families())
def test_every_part_of_a_lora_is_trained_and_nothing_else(family: str, tiny: Target) -> None:
    config, cls = find_family(family)
    torch.manual_seed(1)
    head = cls(config.for_target(tiny.info), tiny.frozen)
    if getattr(head.config, "draft_vocab_size", 0):
        head.set_draft_vocab(torch.arange(head.config.draft_vocab_size))
    head.warm_start()
    head = head.float()
    before = head.state_dict()
    batch = batch_of(tiny, head)
    plain = float(loss_of(head, batch).loss)
    add_lora(head, FIELDS)
    assert float(loss_of(head, batch).loss) == pytest.approx(plain, abs=1e-6)  # a LoRA begins as nothing
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    with torch.no_grad():
        for name, p in trained.items():
            p.add_(torch.randn_like(p) * 0.05 if ".lora_B" in name else 0.0)
    report = loss_of(head, batch)
    report.loss.backward()
    assert float(report.loss) != pytest.approx(plain, abs=1e-4)
    assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in trained.values())
    twin = cls(head.config, tiny.frozen)
    twin.load_state_dict(plain_state(head))
    assert float(loss_of(twin, batch).loss) == pytest.approx(float(report.loss), abs=1e-5)
    assert plain_state(head).keys() == before.keys()


def test_a_lora_saved_merged_is_that_kept_and_peft_reads_it(
    recipe: Any, base: Path, tiny: Target, tmp_path: Path
) -> None:
    heads = {}
    for keep in (False, True):
        config = recipe(head={}, init_from=str(base), out=str(tmp_path / str(keep)), lora=FIELDS | {"keep": keep})
        metrics = train(config, target=tiny)
        assert metrics["steps"] == 6
        heads[keep] = load_head(tmp_path / str(keep) / "head", tiny).state_dict()
    begun = load_head(base, tiny).state_dict()
    assert heads[False].keys() == heads[True].keys() == begun.keys()
    assert all(torch.allclose(heads[False][name], heads[True][name], atol=1e-6, rtol=0) for name in begun)
    changed = {name for name in begun if not torch.equal(begun[name], heads[False][name])}
    assert changed == {f"blocks.{k}.0.linear.weight" for k in range(2)}

    kept = tmp_path / "True" / "head"
    stored = load_file(kept / "model.safetensors")
    assert all(torch.equal(stored[name], begun[name]) for name in begun)  # the base head lies there as it was
    said = read_config(kept)["lora"]
    assert said["from"] == str(base)
    assert said["rank"] == 4
    assert said["keep"]
    assert "which was frozen; it is beside" in (kept / "README.md").read_text()
    assert "it is in the weights" in (tmp_path / "False" / "head" / "README.md").read_text()
    assert not (tmp_path / "False" / "head" / "adapter_config.json").exists()
    wrapped = peft.PeftModel.from_pretrained(load_head(base, tiny), kept).merge_and_unload()
    assert all(torch.allclose(heads[True][name], value, atol=1e-6) for name, value in wrapped.state_dict().items())


def test_a_run_with_a_lora_is_continued_to_the_same_weights(
    recipe: Any, base: Path, tiny: Target, tmp_path: Path
) -> None:
    fields: dict[str, Any] = {"head": {}, "init_from": str(base), "lora": FIELDS | {"dropout": 0.3}, "eval_prompts": 0}
    train(recipe(**fields, out=str(tmp_path / "whole")), target=tiny)
    with killed_after_step(3):
        train(recipe(**fields, out=str(tmp_path / "cut")), target=tiny)
    train(recipe(**fields, out=str(tmp_path / "cut")), target=tiny)
    whole, cut = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_without_a_lora_all_of_the_head_is_trained_on(recipe: Any, base: Path, tiny: Target, tmp_path: Path) -> None:
    config = recipe(head={"num_heads": 2}, init_from=str(base), max_steps=1, lr=0.0, eval_prompts=0)
    train(config, target=tiny)
    begun, now = load_head(base, tiny).state_dict(), load_head(tmp_path / "run" / "head", tiny).state_dict()
    assert all(torch.equal(begun[name], now[name]) for name in begun)  # at no rate, what it began with
    assert sum(p.requires_grad for p in load_head(base, tiny).parameters()) > 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora": {}}, "give init_from=HEAD"),
        ({"lora": {"ranks": 3}, "init_from": "x"}, "unknown key lora.ranks; did you mean lora.rank"),
        ({"lora": {"rank": 0}, "init_from": "x"}, "lora.rank is 0"),
        ({"lora": {"dropout": 1.0}, "init_from": "x"}, "lora.dropout is 1.0"),
        ({"lora": {"alpha": 0}, "init_from": "x"}, "lora.alpha is 0"),
        ({"merge_adapter": True}, "give target_adapter"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str, recipe: Any) -> None:
    with pytest.raises(HeadwayError, match=said):
        recipe(**changes)


def test_dotted_keys_reach_the_lora(recipe: Any) -> None:
    config = recipe(init_from="x")
    fields = {k: v for k, v in config.to_json().items() if k != "lora"}
    assert make_config(fields, ["lora.rank=3", "lora.keep=true"]).lora == FIELDS | {
        "rank": 3,
        "alpha": 32.0,
        "keep": True,
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init_from": "./nowhere"}, "no folder './nowhere'"),
        ({"family": "eagle3", "head": {}}, "of family medusa, the recipe says eagle3"),
        ({"head": {"num_heads": 3}}, "head.num_heads is 3, init_from .* has 2; .* or give head.num_heads=2$"),
        ({"lora": FIELDS | {"modules": ("fc",)}}, "lora.modules has 'fc', the head can have one on blocks.0.0.linear"),
        ({"lora": FIELDS | {"modules": ("lm_heads.0",)}}, "lora.modules has 'lm_heads.0'"),
    ],
)
def test_what_does_not_fit_the_head_is_refused(
    changes: dict[str, Any], said: str, recipe: Any, base: Path, tiny: Target, tmp_path: Path
) -> None:
    with pytest.raises(HeadwayError, match=said):
        train(recipe(**({"head": {}, "init_from": str(base)} | changes)), target=tiny)
    assert not (tmp_path / "run" / "run.json").exists()


def kept_head(tiny: Target, base: Path, folder: Path) -> Path:
    """Write a head with a LoRA beside it."""
    head = load_head(base, tiny)
    name = "blocks.0.0.linear"
    tensors = {
        f"base_model.model.{name}.lora_{part}.weight": torch.ones(shape)
        for part, shape in (("A", (2, 64)), ("B", (64, 2)))
    }
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1}
    lora = {"from": "x", "keep": True}
    return save_head(head, folder, target=tiny.info, lora=lora, kept=(tensors, config))


def test_a_kept_lora_that_is_not_whole_is_refused(tiny: Target, base: Path, tmp_path: Path) -> None:
    folder = kept_head(tiny, base, tmp_path / "head")
    plain, both = load_head(base, tiny).state_dict(), load_head(folder, tiny).state_dict()
    name = "blocks.0.0.linear.weight"
    assert torch.allclose(both[name], plain[name] + 0.5 * 2)

    def again() -> Path:
        shutil.rmtree(tmp_path / "x", ignore_errors=True)
        return Path(shutil.copytree(folder, tmp_path / "x"))

    (again() / "adapter_model.safetensors").unlink()
    with pytest.raises(HeadwayError, match="adapter_model.safetensors does not exist"):
        load_head(tmp_path / "x", tiny)
    (again() / "adapter_config.json").unlink()
    with pytest.raises(HeadwayError, match="adapter_config.json does not exist"):
        load_head(tmp_path / "x", tiny)
    for change, said in (({"use_dora": True}, "use_dora"), ({"peft_type": "IA3"}, "IA3"), ({"r": "many"}, "no config")):
        config = json.loads((again() / "adapter_config.json").read_text())
        (tmp_path / "x" / "adapter_config.json").write_text(json.dumps(config | change))
        with pytest.raises(HeadwayError, match=said):
            load_head(tmp_path / "x", tiny)
    for rename, said in ((lambda n: n.replace("0.0", "7.0"), "does not fit"), (lambda n: n + ".x", "none of a LoRA")):
        tensors = load_file(again() / "adapter_model.safetensors")
        save_file({rename(n): t for n, t in tensors.items()}, tmp_path / "x" / "adapter_model.safetensors")
        with pytest.raises(HeadwayError, match=said):
            load_head(tmp_path / "x", tiny)
    config = json.loads((again() / "config.json").read_text())
    del config["lora"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadwayError, match="of which config.json knows nothing"):
        load_head(tmp_path / "x", tiny)


def test_a_head_is_trained_for_a_target_with_an_adapter(recipe: Any, base: Path, tmp_path: Path, dialogs: Path) -> None:
    torch.manual_seed(5)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    peft.get_peft_model(build(0, num_hidden_layers=4), config).save_pretrained(tmp_path / "adapter")
    model, info = attach(build(0, num_hidden_layers=4), tmp_path / "adapter")
    carrying = target(model, mode="tree")
    fields: dict[str, Any] = {"target_adapter": str(tmp_path / "adapter"), "max_steps": 2, "eval_prompts": 1}
    train(recipe(**fields), target=carrying)
    assert read_config(tmp_path / "run" / "head")["target"]["adapter"]["sha256"] == info.sha256
    # A head of the bare target may begin one for the target with the adapter.
    train(recipe(**fields, head={}, init_from=str(base), lora=FIELDS, out=str(tmp_path / "run2")), target=carrying)
    assert read_config(tmp_path / "run2" / "head")["target"]["adapter"]["sha256"] == info.sha256
    # Dialogs that the bare target wrote are not those of the target with the adapter.
    manifest = json.loads((dialogs / "manifest.json").read_text())
    (dialogs / "manifest.json").write_text(json.dumps(manifest | {"server": None, "adapter": None}))
    with pytest.raises(HeadwayError, match="made with the bare target"):
        train(recipe(**fields, out=str(tmp_path / "run3")), target=carrying)

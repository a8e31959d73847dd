"""Recipes: what is read, what is refused and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import families, find_family
from headway.inference.target import Target
from headway.train.config import load_recipe, make_config

LEAST: dict[str, Any] = {"family": "medusa", "target": "t", "dialogs": "d", "out": "o", "max_steps": 3}


def test_a_recipe_and_what_the_command_line_changes(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "# commands\nfamily: eagle3\ntarget: owner/model\ndialogs: runs/d\nout: runs/o\nepochs: 2\nlr: 1e-3\n"
        "betas: [0.9, 0.99]\nhead:\n  steps: 3\n  taps: [0, 2, 3]\n"
    )
    config = load_recipe(path, ["lr=5e-4", "head.steps=5", "autocast=true", "max_seconds=60", "out=runs/1=2"])
    assert (config.family, config.epochs, config.lr, config.autocast) == ("eagle3", 2.0, 5e-4, True)
    assert config.max_seconds == 60.0
    assert config.betas == (0.9, 0.99)
    assert config.head == {"steps": 5, "taps": (0, 2, 3)}
    assert config.out == "runs/1=2"
    assert config.to_json()["betas"] == [0.9, 0.99]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning": 1}, "unknown key learning; "),
        ({"warmups": 1}, "unknown key warmups; did you mean warmup?"),
        ({"head.num_head": 2}, "unknown key head.num_head; did you mean head.num_heads?"),
        ({"lr": "fast"}, "lr is 'fast' (str); it must be a number"),
        ({"max_steps": 2.5}, "max_steps is 2.5 (float); it must be a whole number or null"),
        ({"autocast": 1}, "autocast is 1 (int); it must be true or false"),
        ({"seed": True}, "seed is True (bool); it must be a whole number"),
        ({"cache": "ram"}, "cache is 'ram' (str); it must be one of auto, memory, disk, off"),
        ({"betas": [0.9]}, "betas is [0.9] (list); it must be a list of a number, a number"),
        ({"head.num_heads": "four"}, "head.num_heads is 'four' (str); it must be a whole number"),
        ({"head.lm_head": "mine"}, "head.lm_head is 'mine' (str); it must be one of own, shared, draft"),
        ({"family": "medusae"}, f"unknown family 'medusae'; there are {', '.join(families())}"),
        ({"max_steps": None}, "give epochs, max_steps or max_seconds"),
        ({"max_steps": 0}, "max_steps is 0; give a finite number above 0"),
        ({"grad_accum": 0}, "grad_accum is 0; give a finite number of 1 or more"),
        ({"max_seconds": float("inf")}, "max_seconds is inf; give a finite number above 0"),
        ({"epochs": float("nan")}, "epochs is nan; give a finite number above 0"),
        ({"lr": float("nan")}, "lr is nan; give a finite number of 0 or more"),
        ({"clip": float("inf")}, "clip is inf; give a finite number of 0 or more"),
        ({"betas": [0.9, 1.0]}, "betas is [0.9, 1.0]; give two numbers from 0 to below 1"),
        ({"head": "wide"}, "head is 'wide'; give a mapping"),
        ({"seed": 10**20}, "seed is 100000000000000000000; give at most"),
        ({"max_seconds": 1e308}, "max_seconds is 1e+308; give at most"),
        ({"loss": "kld"}, "unknown loss 'kld'; did you mean kl?"),
        ({"loss": "topk:k=none"}, "cannot read loss 'topk:k=none'; topk takes a whole number of 1 or more: topk:k=64"),
        ({"step_weights": [1, -1]}, "step_weights is [1.0, -1.0]; give finite numbers of 0 or more"),
        ({"step_weights": "1"}, "step_weights is '1' (str); it must be a list of a number"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd' (str); it must be one of adamw, muon"),
        ({"schedule": "linear"}, "schedule is 'linear' (str); it must be one of cosine, wsd"),
        ({"ema": 1.0}, "ema is 1.0; give a number from 0 to below 1"),
        ({"ema": float("nan")}, "ema is nan; give a number from 0 to below 1"),
        ({"cooldown": -1.0}, "cooldown is -1.0; give a finite number of 0 or more"),
        (
            {"schedule": "wsd", "warmup": 0.5, "cooldown": 0.6},
            "warmup 0.5 and cooldown 0.6 are more than all the steps",
        ),
        ({"eval_fraction": 1.5}, "eval_fraction is 1.5; give a number from 0 to 1"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        make_config(LEAST | changes)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "head", "named"),
    [
        ("hydra", {"intermediate_size": -4}, "head.intermediate_size is -4; give 1 or more"),
        ("eagle", {"num_attention_heads": 0}, "head.num_attention_heads is 0; give 1 or more"),
        ("eagle3", {"num_key_value_heads": -1}, "head.num_key_value_heads is -1; give 1 or more"),
        (
            "peagle",
            {"num_attention_heads": 3},
            "head.num_attention_heads 3 is no multiple of head.num_key_value_heads 2",
        ),
        ("eagle", {"head_dim": 7}, "head.head_dim is 7; give an even number"),
        ("eagle3", {"max_position_embeddings": 0}, "head.max_position_embeddings is 0; give 1 or more"),
        ("peagle", {"rms_norm_eps": float("nan")}, "head.rms_norm_eps is nan; give a finite number above 0"),
        ("medusa", {"decay": -0.5}, "head.decay is -0.5; give a finite number of 0 or more"),
        ("eagle3", {"decay": float("nan")}, "head.decay is nan; give a finite number of 0 or more"),
        ("eagle", {"noise": float("inf")}, "head.noise is inf; give a finite number of 0 or more"),
        ("eagle", {"rope": {"rope_type": "yarn"}}, "head.rope"),
        ("eagle", {"rope": {"rope_type": "round"}}, "head.rope"),
        ("eagle", {"rope": {"rope_theta": -1.0}}, "head.rope"),
        (
            "eagle",
            {"rope": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}},
            "does not turn whole heads of 16",
        ),
    ],
)
def test_sizes_of_a_head_that_none_can_have(tiny: Target, family: str, head: dict[str, Any], named: str) -> None:
    with pytest.raises(HeadwayError) as caught:
        find_family(family)[0].for_target(tiny.info, **head)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["family", "target", "dialogs", "out"])
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(HeadwayError, match=f"lacks '{key}'"):
        make_config({k: v for k, v in LEAST.items() if k != key})


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match="no recipe"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- a\n- b\n")
    with pytest.raises(HeadwayError, match="no `key: value` lines"):
        load_recipe(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("family: [medusa\nlr: 1")
    with pytest.raises(HeadwayError, match=r"broken\.yaml is no YAML"):
        load_recipe(tmp_path / "broken.yaml")

    (tmp_path / "latin.yaml").write_bytes("family: medusa # für".encode("latin-1"))
    with pytest.raises(HeadwayError, match="is not UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


def test_plain_words_are_text(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(
        "family: medusa\ntarget: no\ndialogs: 2024-13-45\nout: on\nmax_steps: 1\ncache: off\ntree: off\n"
        "autocast: true\nhead:\n"
    )
    config = load_recipe(path, ["head.num_heads=2", "revision=2024-01-31"])
    assert (config.target, config.dialogs, config.out) == ("no", "2024-13-45", "on")
    assert (config.cache, config.tree, config.autocast, config.revision) == ("off", "off", True, "2024-01-31")
    assert config.head == {"num_heads": 2}
    assert load_recipe(path, ["cache=off", "tree=chain:2"]).tree == "chain:2"
    with pytest.raises(HeadwayError, match="seed is '0x_'"):
        load_recipe(path, ["seed=0x_"])


@pytest.mark.parametrize("override", ["lr", "=3", "--lr=3"])
def test_an_override_without_a_key_or_value(override: str) -> None:
    with pytest.raises(HeadwayError, match="key=value"):
        make_config(LEAST, [override])


RECIPES = [p for p in Path(__file__).parents[2].glob("recipes/**/*.yaml") if p.parent.name != "accelerate"]


@pytest.mark.parametrize("path", sorted(RECIPES), ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_begin_with_their_commands(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("#")
    assert "train_heads.py" in text.partition("\nfamily:")[0]
    load_recipe(path)

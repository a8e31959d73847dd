"""Recipes for real targets: their headers say what the estimate says of the real sizes, and they train a tiny twin.

real_configs.json holds the published sizes of each architecture, and the published number of its weights.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tests.tiny as tiny
from headway.heads.common import losses
from headway.heads.common.checkpoint import read_config
from headway.inference.sizes import read_sizes
from headway.train import estimate as module
from headway.train import features
from headway.train.config import load_recipe
from headway.train.estimate import GPUS, clock, estimate, gb
from headway.train.loop import train
from tests.train.conftest import write_dialogs

ROOT = Path(__file__).parents[2]
REAL: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "real_configs.json").read_text())
RECIPES = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b-eagle3",
    "Qwen/Qwen3-8B": "qwen3-8b-eagle3",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-eagle3",
    "google/gemma-3-12b-it": "gemma-3-12b-eagle3",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b-eagle3",
}
FOLLOWED = ("meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B-Instruct-2507")
"""Their training step is followed, which takes seconds; the figures of the others that need it would be old when theirs are."""
SMALL: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "query_pre_attn_scalar": 16,
    "sliding_window": 8,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "image_size": 28,
    "mm_tokens_per_image": 4,
    "original_max_position_embeddings": 64,
}


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a config of the same architecture and small sizes."""
    return {k: shrink(v) if isinstance(v, dict) else SMALL.get(k, v) if v is not None else v for k, v in fields.items()}


@pytest.fixture(params=RECIPES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_header_says_what_the_estimate_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    AutoConfig.for_model(**REAL[name]["config"]).save_pretrained(tmp_path)
    assert read_sizes(tmp_path).num_weights == REAL[name]["weights"], "real_configs.json has the sizes wrong"
    for where in (module, features):
        monkeypatch.setattr(where, "free_disk", lambda folder: 10**15)
    # Fewer, larger chunks are followed sooner; they need some more memory and compute the same.
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 1 << 27)
    if name not in FOLLOWED:
        monkeypatch.setattr(module, "follow_step", lambda *sizes: (1.0, 0))
    path = ROOT / "recipes" / f"{RECIPES[name]}.yaml"
    header = path.read_text().partition("family:")[0]
    command = re.search(r"headway train (\S+) --estimate --rows (\d+) --mean-tokens (\d+) --on (\w+)", header)
    assert command is not None
    assert command[1] == f"recipes/{path.name}"
    config = load_recipe(path)
    assert config.target == name
    config = load_recipe(path, [f"target={tmp_path}"])
    found = estimate(config, rows=int(command[2]), mean_tokens=int(command[3]), on=command[4])
    assert not found.problems
    assert re.search(r"# time: (\d+\.\d h|\d+ min) of training steps", header)
    assert name not in FOLLOWED or f"# time: {clock(found.time['together'])} of training steps" in header
    assert f"# disk: {gb(found.disk['together'])} for states and head" in header
    assert f"kept they would be {gb(found.features['bfloat16'])}" in header
    said = re.search(rf"# hardware: 1 x {command[4]}, (\d+) GiB of its memory", header)
    assert said is not None
    least = found.memory["target"] + found.memory["head"]
    assert least < int(said[1]) * 2**30 < GPUS[command[4]][1] * 10**9
    assert found.memory["together"] < (int(said[1]) + 4) * 2**30
    assert "not measured" in header


def test_the_recipe_trains_a_tiny_twin(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**shrink(REAL[name]["config"]), pad_token_id=256, bos_token_id=257, eos_token_id=260)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    twin = tiny.target(model, mode="tree")
    changes = {
        "target": "tiny", "dialogs": write_dialogs(tmp_path / "dialogs"), "out": tmp_path / "run", "dtype": "float32",
        "max_steps": 2, "tokens_per_batch": 48, "eval_prompts": 1, "eval_tokens": 4, "head.draft_vocab_size": 64,
        "log_every": 1,
    }  # fmt: skip
    recipe = load_recipe(
        ROOT / "recipes" / f"{RECIPES[name]}.yaml", [f"{key}={value}" for key, value in changes.items()]
    )
    metrics = train(recipe, target=twin)
    assert metrics["steps"] == 2
    assert metrics["accepted_length"] >= 1
    saved = read_config(tmp_path / "run" / "head")
    assert (saved["family"], saved["head"]["steps"]) == ("eagle3", 7)


def test_weights_beside_the_text_model_cost_no_token(tmp_path: Path) -> None:
    fields = shrink(REAL["google/gemma-3-12b-it"]["config"])
    AutoConfig.for_model(**fields).save_pretrained(tmp_path / "both")
    AutoConfig.for_model(**fields["text_config"]).save_pretrained(tmp_path / "text")
    both, text = read_sizes(tmp_path / "both"), read_sizes(tmp_path / "text")
    assert both.num_active == text.num_active
    assert both.num_weights > text.num_weights


def test_every_real_target_has_a_recipe() -> None:
    assert set(REAL) == set(RECIPES)
    assert all((ROOT / "recipes" / f"{name}.yaml").is_file() for name in RECIPES.values())

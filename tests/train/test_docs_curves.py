"""docs/curves.py on a tiny target: rows, table and plot; what was measured before is not measured again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from headway.heads.common.errors import HeadwayError
from headway.train.config import load_recipe
from tests import tiny
from tests.train.conftest import write_dialogs

RECIPE = """\
family: medusa
target: none
dialogs: none
out: none
head: {num_heads: 2, draft_vocab_size: 64}
max_seconds: 60
tokens_per_batch: 48
grad_accum: 2
eval_rows: 3
lr: 0.01
"""


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "curves.py"
    spec = importlib.util.spec_from_file_location("docs_curves", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> list[str]:
    """Recipe, overrides and options of a comparison that takes a second or two."""
    folder = tmp_path_factory.mktemp("curves")
    tiny.build(0, num_hidden_layers=4).save_pretrained(folder / "model")
    tiny.byte_tokenizer().save_pretrained(folder / "model")
    write_dialogs(folder / "dialogs")
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "held.jsonl").write_text("".join(json.dumps({"id": n, "prompt": f"Say {n}."}) + "\n" for n in "abc"))
    recipe = [str(folder / "recipe.yaml"), f"target={folder / 'model'}", f"dialogs={folder / 'dialogs'}"]
    options = [
        "--prompts",
        str(folder / "held.jsonl"),
        "--limit",
        "2",
        "-n",
        "6",
        "--tree",
        "chain:2",
        "--loss-tokens",
        "90",
    ]
    return [*recipe, *options, "--out", str(folder / "out")]


def test_rows_table_and_plot_and_nothing_twice(curves, given, monkeypatch, capsys):
    out = Path(given[-1])
    curves.main([*given, "--tokens", "40,90", "--losses", "kl,lk:eta=2", "--seeds", "0,1"])
    rows = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
    found = [(row["loss"], row["tokens"], row["seed"]) for row in rows]
    assert found == [("kl", 40, 0), ("kl", 90, 0), ("lk:eta=2", 90, 0), ("kl", 90, 1), ("lk:eta=2", 90, 1)]
    for row in rows:
        assert row["tokens"] <= row["trained_tokens"] < row["tokens"] + 96  # a step is two batches of up to 48
        assert 1 <= row["accepted_length"] <= 3
        assert row["sets"] == {"held": row["accepted_length"]}
    assert len({row["trained_tokens"] for row in rows if row["seed"] == 1}) == 1  # of the same batches
    table = (out / "curves.md").read_text()
    assert table.count("| kl | 0 |") == 3  # twice in the series, once among the losses
    assert "Seeds of one loss differ by" in table
    assert (out / "curves.png").stat().st_size > 1000
    capsys.readouterr()

    def again(*given, **named):
        raise AssertionError

    monkeypatch.setattr(curves, "train", again)
    curves.main([*given, "--tokens", "40,90", "--losses", "kl"])
    assert "| kl | 0 |" in capsys.readouterr().out


def test_other_settings_are_not_mixed_in(curves, given):
    with pytest.raises(HeadwayError, match=r"lr was 0\.01, now 0\.02"):
        curves.main([*given, "lr=0.02"])
    with pytest.raises(HeadwayError, match="dtype is auto"):
        curves.main([*given, "dtype=auto"])
    with pytest.raises(HeadwayError, match="loss"):
        curves.main([*given, "--losses", "kl,none"])


def test_steps_are_those_whose_batches_hold_the_tokens(curves, given):
    config = load_recipe(given[0], [*given[1:3], "max_steps=1"])
    steps, epochs = curves.steps_for(config, 1000, 512)
    assert steps > 1000 / 96
    assert epochs > 4  # 13 dialogs of about 13 goals
    assert curves.steps_for(config, 1, 512)[0] == 1

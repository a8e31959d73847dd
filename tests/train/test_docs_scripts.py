"""docs/curves.py and docs/store.py on a tiny target."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from headway.data.dialogs import read_dialogs
from headway.heads.common.errors import HeadwayError
from headway.train.batches import make_rows
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
log_every: 1
"""


def script(name: str) -> ModuleType:
    """Return the module of docs/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", Path(__file__).parents[2] / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    return script("curves")


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
        "150",
    ]
    return [*recipe, *options, "--out", str(folder / "out")]


def test_rows_table_and_plot_and_nothing_twice(curves, given, monkeypatch, capsys):
    out = Path(given[-1])
    curves.main([*given, "--tokens", "40,150", "--losses", "kl,lk:eta=2", "--seeds", "0,1"])
    rows = [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]
    found = [(row["loss"], row["tokens"], row["seed"]) for row in rows]
    assert found == [("kl", 40, 0), ("kl", 150, 0), ("lk:eta=2", 150, 0), ("kl", 150, 1), ("lk:eta=2", 150, 1)]
    for row in rows:
        run = out / f"{row['loss'].replace(':', '-')}-{row['tokens']}-{row['seed']}"
        steps = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        *_, before, last = 0, *(step["total_tokens"] for step in steps if "lr" in step)
        assert before < row["tokens"] <= last == row["trained_tokens"]
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
    curves.main([*given, "--tokens", "40,150", "--losses", "kl"])
    assert "| kl | 0 |" in capsys.readouterr().out


def test_other_settings_are_not_mixed_in(curves, given):
    with pytest.raises(HeadwayError, match=r"lr was 0\.01, now 0\.02"):
        curves.main([*given, "lr=0.02"])
    with pytest.raises(HeadwayError, match="dtype is auto"):
        curves.main([*given, "dtype=auto"])
    with pytest.raises(HeadwayError, match="loss"):
        curves.main([*given, "--losses", "kl,none"])
    with pytest.raises(HeadwayError, match="depth 3"):  # before anything is trained
        curves.main([*given[:-1], f"{given[-1]}-deep", "--tree", "chain:3"])
    assert not list(Path(f"{given[-1]}-deep").glob("kl-*/head"))


def test_steps_are_those_whose_batches_hold_the_tokens(curves, given):
    config = load_recipe(given[0], [*given[1:3], "max_steps=1", "grad_accum=1"])
    rows = make_rows(read_dialogs(config.dialogs), 512, config.eval_fraction, config.eval_rows)
    epoch = sum(row.num_goals for row in rows.train)
    steps, epochs = curves.steps_for(config, epoch, 512)
    assert epochs == 1
    assert curves.steps_for(config, epoch + 1, 512) == (steps + 1, 1 + 1 / steps)
    assert curves.steps_for(config, 1, 512)[0] == 1
    in_pairs = load_recipe(given[0], [*given[1:3], "max_steps=1"])
    assert curves.steps_for(in_pairs, 2 * epoch, 512) == (steps, 2)


def test_what_int8_costs_beside_what_seeds_do(given, tmp_path, capsys):
    options = ["max_seconds=null", "max_steps=2", "dtype=float32", "tree=chain:2", "eval_tokens=4"]
    script("store").main([*given[:3], *options, "--prompts", "1", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "store.json").read_text())
    assert [(row["seed"], row["store"]) for row in rows] == [(s, k) for s in (0, 1) for k in ("bfloat16", "int8")]
    assert rows[0]["held_out_loss"] != rows[1]["held_out_loss"]
    assert "int8 minus bfloat16: " in capsys.readouterr().out

"""The demo from end to end on a tiny random model: every stage leaves its artefact, and a second call does none again."""

from __future__ import annotations

import json
import sys

import pytest

from headway.heads.common.errors import HeadwayError
from headway.train import demo
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    target = tiny.build(4, max_position_embeddings=4096)
    target.generation_config.eos_token_id = list(range(0, 256, 8))  # a random model ends its turns soon
    target.save_pretrained(folder)
    tiny.byte_tokenizer().save_pretrained(folder)
    return folder


def test_the_demo_runs_and_is_not_run_twice(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(demo, "BENCH_TOKENS", 8)
    monkeypatch.setattr(demo, "BATCH_ROWS", 4)
    monkeypatch.setattr(demo, "BENCH_PROMPTS", 1)
    small = {"draft_vocab_size": 128}
    monkeypatch.setattr(demo, "HEADS", {"medusa": small, "eagle3": {**small, "steps": 2}})
    report = demo.main(0.5, tmp_path, model=model)
    names = [row["name"] for row in report["rows"]]
    assert {"transformers", "plain", "medusa", "eagle3"} == set(names)
    for part in ("prompts.jsonl", "dialogs/manifest.json", "medusa/head/tree.json", "eagle3/head/model.safetensors"):
        assert (tmp_path / part).is_file(), part
    assert (tmp_path / "report.png").stat().st_size > 1000
    done = json.loads((tmp_path / "stages.json").read_text())
    capsys.readouterr()
    demo.main(0.5, tmp_path, model=model)
    assert json.loads((tmp_path / "stages.json").read_text()) == done
    assert "done before" in capsys.readouterr().out
    with pytest.raises(HeadwayError, match=r"a demo of 0\.5 minutes.*--out"):
        demo.main(2, tmp_path, model=model)


@pytest.mark.parametrize("stage", ["write_prompts", "distill", "train", "_tune", "bench"])
def test_an_interrupted_demo_goes_on(model, tmp_path, monkeypatch, stage):
    for name, value in (("BENCH_TOKENS", 4), ("BATCH_ROWS", 4), ("BENCH_PROMPTS", 1)):
        monkeypatch.setattr(demo, name, value)
    small = {"draft_vocab_size": 128}
    monkeypatch.setattr(demo, "HEADS", {"medusa": small, "eagle3": {**small, "steps": 2}})

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, stage, interrupted)
        with pytest.raises(KeyboardInterrupt):
            demo.main(0.2, tmp_path, model=model)
    done = json.loads((tmp_path / "stages.json").read_text())
    demo.main(0.2, tmp_path, model=model)
    after = json.loads((tmp_path / "stages.json").read_text())
    assert {name: after[name] for name in done} == done  # nothing was done twice
    assert len(after) == 8  # six stages, the budget and the dtypes
    for part in ("medusa/head/tree.json", "eagle3/head/tree.json", "report.json", "report.png"):
        assert (tmp_path / part).is_file(), part


def test_a_missing_plotter_is_said_first(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "smollm2", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(HeadwayError, match=r"headway\[plot\]"):
        demo.main(1, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_time_is_refused(tmp_path):
    with pytest.raises(HeadwayError, match="minutes"):
        demo.main(0, tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""What a run tells while it runs: log rows, trackers, and run.json's account of what made it."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.heads.common.checkpoint import read_config
from headway.heads.common.errors import HeadwayError
from headway.heads.common.redact import REMOVED, without_secrets
from headway.inference.target import Target
from headway.train import provenance, setup, trackers
from headway.train.config import TrainConfig
from headway.train.loop import train

Make = Callable[..., TrainConfig]


def log_of(config: TrainConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(config.out) / "log.jsonl").read_text().splitlines()]


def run_of(config: TrainConfig) -> dict[str, Any]:
    return json.loads((Path(config.out) / "run.json").read_text())


def test_a_log_row_says_speed_memory_and_time_left(recipe: Make, tiny: Target) -> None:
    config = recipe(eval_every=3)
    metrics = train(config, target=tiny)
    steps = [row for row in log_of(config) if "lr" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6]
    last = steps[-1]
    assert last["left_seconds"] == 0
    assert steps[0]["left_seconds"] == pytest.approx(5 * steps[0]["seconds"], rel=0.2, abs=0.1)
    first = steps[0]
    per_s = (last["total_tokens"] - first["total_tokens"]) / (last["seconds"] - first["seconds"])
    assert last["tokens_per_s"] == pytest.approx(per_s, rel=0.02)
    assert 0.05 < last["memory_gib"] < 100
    held_out = [row for row in log_of(config) if "accepted_length" in row]
    assert [row["step"] for row in held_out] == [3, 6]
    assert all(0 < row["accepted_seconds"] <= row["held_out_seconds"] for row in held_out)
    assert metrics["eval_seconds"] == pytest.approx(sum(row["held_out_seconds"] for row in held_out), abs=0.1)
    assert sum(row["held_out_seconds"] for row in held_out) > 0, "and train_seconds has none of it"
    assert metrics["train_seconds"] == pytest.approx(held_out[-1]["seconds"], abs=0.1)


def test_a_run_says_what_made_it(recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = recipe(save_every=3)
    train(config, target=tiny, argv=["r.yaml", "hf_token=abc", "tokens_per_batch=48"])
    run = run_of(config)
    assert run["argv"] == ["r.yaml", f"hf_token={REMOVED}", "tokens_per_batch=48"]
    assert run["code"] == provenance.code_version()
    assert {"torch", "transformers", "accelerate", "safetensors", "numpy"} <= set(run["versions"])
    assert all(run["host"][name] for name in ("system", "cpu", "cores", "memory_gib"))
    assert run["rows"] == {"train": 13, "held_out": 3, "cut": 0, "without_goal": 0}
    assert (run["mode"], run["weights"]) == ("tree", tiny.fingerprint)
    assert (run["dialogs"]["vocab_size"], len(run["dialogs_sha256"])) == (272, 64)
    assert "continued" not in run
    state = Path(config.out) / "state"
    (state / "step-6" / "state.json").unlink()
    (state / "step-6").rename(tmp_path / "gone")
    train(recipe(save_every=0), target=tiny, argv=["again.yaml"])
    [again] = run_of(config)["continued"]
    assert (again["step"], again["argv"]) == (3, ["again.yaml"])
    assert again["host"] == run["host"]
    assert again["at"] >= run["started"]


def test_a_checkout_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "code.py"
    file.write_text("")
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    assert set(provenance.code_version()) == {"version"}, "no checkout"

    def git(*words: str) -> str:
        who = ["-c", "user.name=n", "-c", "user.email=e@x"]
        done = subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    assert set(provenance.code_version()) == {"version"}, "a checkout without a commit"
    git("add", ".")
    git("commit", "-q", "-m", "x")
    found = provenance.code_version()
    assert (found["commit"], found["changed"]) == (git("rev-parse", "HEAD"), False)
    file.write_text("x = 1\n")
    assert provenance.code_version()["changed"] is True


def test_secrets_of_a_command_are_not_kept() -> None:
    given = ["--hf-token", "abc", "--api-key=abc", "wandb.key=abc", "password=abc", "https://me:abc@host/v1"]
    given += [
        "https://host/v1?x=1&access_token=abc",
        "hf_" + "a" * 30,
        "hf_oauth_" + "a" * 10 + ".abc",
        "x=sk-" + "b" * 30,
        "--secret",
        "--next",
        "abc-kept",
    ]
    kept = without_secrets(given)
    assert "abc" not in " ".join(kept).replace("abc-kept", "")
    assert not any(letter * 20 in " ".join(kept) for letter in "ab")
    assert kept[-2:] == ["--next", "abc-kept"]
    harmless = [
        "tokens_per_batch=48",
        "--max-new-tokens",
        "9",
        "head.token_weight=0.1",
        "top_k=3",
        "--api-key-env",
        "MY_KEY",
    ]
    harmless += ["https://host/v1?max_tokens=3", "/data/hf_cache/keys.jsonl", "eval_tokens=8"]
    assert without_secrets(harmless) == harmless


def test_a_tracker_that_is_not_installed_is_refused(
    recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        config = recipe(tracker=name)
        with pytest.raises(HeadwayError, match=rf"pip install 'headway\[{name}\]'"):
            train(config, target=tiny)
        assert not Path(config.out).exists()


def test_tensorboard_gets_the_figures(recipe: Make, tiny: Target) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = recipe(tracker="tensorboard")
    train(config, target=tiny)
    [file] = [p for p in Path(config.out).rglob("events.out.tfevents.*") if p.parent.name == "headway"]
    events = EventAccumulator(str(file))
    events.Reload()
    wanted = {"loss", "lr", "agreement_S/0", "agreement_S/1", "tokens_per_s", "memory_gib", "left_seconds"}
    wanted |= {"accepted_length", "held_out_loss", "held_out_agreement_S/0"}
    assert wanted <= set(events.Tags()["scalars"])
    logged = {row["step"]: row["loss"] for row in log_of(config) if "lr" in row}
    assert {e.step: e.value for e in events.Scalars("loss")} == pytest.approx(logged, rel=1e-6)


def test_wandb_without_an_account_is_offline(recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name in (
        "WANDB_SILENT",
        "WANDB_X_DISABLE_STATS",
        "WANDB_X_DISABLE_META",
        "WANDB_DISABLE_GIT",
        "WANDB_DISABLE_CODE",
    ):
        monkeypatch.setenv(name, "true")
    monkeypatch.setattr(trackers, "knows_wandb_account", lambda: False)
    config = recipe(tracker="wandb", max_steps=1)
    train(config, target=tiny)
    [file] = Path(config.out).rglob("offline-run-*/run-*.wandb")
    give_up = time.monotonic() + 10
    while not all(name in file.read_bytes() for name in (b"accepted_length", b"tokens_per_s")):
        assert time.monotonic() < give_up, "wandb's own process writes it"
        time.sleep(0.05)


def test_trackio_gets_the_figures(recipe: Make, tiny: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    folder = Path(trackio.TRACKIO_DIR)  # where an earlier import in this process found it
    train(recipe(tracker="trackio", max_steps=2), target=tiny)
    with sqlite3.connect(folder / "headway.db") as base:
        name = str(tmp_path / "run")
        rows = base.execute("select step, metrics from metrics where run_name = ?", (name,)).fetchall()
    logged = [json.loads(metrics) | {"step": step} for step, metrics in rows]
    assert {row["step"] for row in logged if "lr" in row} == {1, 2}
    assert [row["accepted_length"] for row in logged if "accepted_length" in row]


def test_an_account_of_wandb_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert trackers.knows_wandb_account()
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert not trackers.knows_wandb_account()
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert trackers.knows_wandb_account()


def test_trackers_end_when_a_run_is_interrupted(recipe: Make, tiny: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr("headway.train.loop.end_tracking", ended.append)
    monkeypatch.setattr("headway.train.loop.steps", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        train(recipe(), target=tiny)
    assert len(ended) == 1


def test_the_head_says_how_long_it_was_evaluated(recipe: Make, tiny: Target) -> None:
    config = recipe()
    metrics = train(config, target=tiny)
    assert read_config(Path(config.out) / "head")["metrics"]["eval_seconds"] == metrics["eval_seconds"]

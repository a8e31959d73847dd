"""The whole path on one machine: a real model, its own words, two heads, and what they are worth.

    headway demo --minutes 25

Every stage leaves a finished artefact in the run folder and is skipped when that is there, so an interrupted demo is
continued by the same command.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from headway.data.dialogs import read_dialogs
from headway.data.distill import distill
from headway.data.magpie import write_prompts
from headway.data.manifest import read_json, write_json
from headway.data.progress import Progress
from headway.data.prompts import read_rows
from headway.data.recorded import usual_taps
from headway.heads.common.checkpoint import WEIGHTS, load_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.bench import bench, print_report, require_matplotlib, save_plot, save_report
from headway.inference.embedded import smollm2
from headway.inference.sampling import Settings
from headway.inference.target import Target, fast_dtype
from headway.inference.tune import FILE as TREE
from headway.inference.tune import load_policy, save_policy, tune
from headway.inference.unfinished import Unfinished, file_identity
from headway.train.batches import make_rows
from headway.train.config import TrainConfig, make_config
from headway.train.evaluate import choose_prompts
from headway.train.features import Memory
from headway.train.loop import train

SHARES = {"prompts": 0.12, "distil": 0.30, "eagle3": 0.26, "medusa": 0.06, "tune": 0.04, "bench": 0.12}
"""Parts of the time, `tune` for each head; the rest is start-up, evaluations, and the ends of what had begun."""
ANSWERS = Settings(max_new_tokens=192)
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 3, "draft_vocab_size": 4096},
    "eagle3": {"steps": 3, "draft_vocab_size": 4096},
}
OPENERS = ("", "Complete this Python function.\n\n```python\ndef", "", "How many", "", "Write a Python function that")
"""Half of the prompts are left to the target, half are steered to code and sums: what the bench asks for is among what
the heads learn from, though none of its prompts is."""
BATCH_ROWS = 128
BATCH_TOKENS = 512
BENCH_TOKENS = 80
BENCH_PROMPTS = 8
"""Of each set, in turn, as far as the time allows."""


def main(minutes: float = 25.0, out: str | Path = "runs/demo", model: str | Path | None = None) -> dict[str, Any]:
    """Run the demo within about `minutes`, installation not counted, and return the bench's report.

    `model` is a target folder to use instead of SmolLM2-135M-Instruct. Raises HeadwayError for a budget that is not positive.
    """
    if not 0 < minutes < math.inf:
        raise HeadwayError(f"minutes is {minutes}; give a finite number above 0 (25 is what the README shows)")
    require_matplotlib()  # at the end is the wrong time to miss it
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    begin = perf_counter()
    seconds = {name: share * 60 * minutes for name, share in SHARES.items()}
    stages = _Stages(folder / "stages.json")
    before = stages.keep("minutes", lambda: minutes)
    if before != minutes:
        raise HeadwayError(
            f"{folder} holds a demo of {before:g} minutes; continue it with --minutes {before:g}, or give another --out "
            f"for one of {minutes:g} (make demo MINUTES={minutes:g} OUT=...)"
        )

    source = smollm2() if model is None else model
    dtype, step_dtype, decode_dtype = stages.keep("dtypes", _time_dtypes)
    target = Target.load(source, dtype=dtype)
    _say(
        f"target {target.info.name}: {target.mode} mode, {torch.get_num_threads()} threads; {dtype} to write, {step_dtype} "
        f"to train, {decode_dtype} to decode, as timed here"
    )

    prompts = folder / "prompts.jsonl"
    stages.run(
        "1/6 the target writes prompts",
        lambda: write_prompts(
            target, prompts, count=100_000, openers=OPENERS, batch_size=BATCH_ROWS, seconds=seconds["prompts"]
        ),
    )
    rows, report = read_rows(str(prompts))
    _say(str(report))
    stages.run(
        "2/6 the target answers them",
        lambda: distill(
            target,
            rows,
            folder / "dialogs",
            settings=ANSWERS,
            batch_size=BATCH_ROWS,
            source=str(prompts),
            seconds=seconds["distil"],
            record=usual_taps(target.info),
        ),
    )
    shared: Memory = {}  # the second head reads the features that the first one's run computed
    for number, name in ((3, "eagle3"), (4, "medusa")):
        config = make_config(
            {
                "family": name,
                "target": target.info.name,
                "dialogs": str(folder / "dialogs"),
                "out": str(folder / name),
                "dtype": dtype,
                "autocast": step_dtype == "bfloat16",
                "supervise": "all",
                "max_seconds": seconds[name],
                "lr": 1e-3,
                "tokens_per_batch": BATCH_TOKENS,
                "head": HEADS[name],
                "eval_prompts": 4,
                "eval_tokens": 48,
            }
        )
        stages.run(f"{number}/6 train {name}", lambda config=config: train(config, target=target, shared=shared))  # type: ignore[misc]

    if dtype != decode_dtype:
        target = Target.load(source, dtype=decode_dtype)
    heads = {name: load_head(folder / name / "head", target, dtype=target.dtype) for name in HEADS}
    calibration = _held_out_prompts(folder / "dialogs")
    for name, head in heads.items():
        stages.run(
            f"5/6 choose a tree for {name}",
            lambda name=name, head=head: _tune(target, head, calibration, folder / name / "head", seconds["tune"]),  # type: ignore[misc]
        )
    result = _bench(target, heads, folder, seconds["bench"])
    _say(f"done in {(perf_counter() - begin) / 60:.1f} minutes; heads, report and plot are in {folder}")
    return result


def _time_dtypes() -> list[str]:
    """Return the dtypes to write, to train and to decode in."""
    return [fast_dtype("cpu", BATCH_ROWS), fast_dtype("cpu", BATCH_TOKENS, training=True), fast_dtype("cpu")]


def _tune(target: Target, head: Head, prompts: list[list[int]], folder: Path, seconds: float) -> None:
    unfinished = Unfinished(f"tune-{folder.parent.name}", _identity([folder], prompts), folder.parent.parent)
    progress = Progress("tune: answers", len(prompts) - len(unfinished.done), seconds=seconds)
    report = tune(
        target,
        head,
        prompts,
        rows=(1,),  # which is what is measured next
        seconds=seconds,
        on_progress=progress.add,
        unfinished=unfinished,
    )
    save_policy(folder, target, report)
    unfinished.finish()
    ratio = report.get("expected_ratio_vs_plain", 1.0)
    progress.close(f"tune: {report['policy']}, expected to be {ratio:.2f} x plain")


def _held_out_prompts(folder: Path) -> list[list[int]]:
    """Return prompts that neither head was trained on: a tree fitted to training prompts would be too large."""
    config = TrainConfig(family="medusa", target="", dialogs=str(folder), out="", max_steps=1)
    rows = make_rows(read_dialogs(folder), config.max_length, config.eval_fraction, config.eval_rows)
    return choose_prompts(rows.held_out, 12, config.max_length)


def _bench(target: Target, heads: dict[str, Any], folder: Path, seconds: float) -> dict[str, Any]:
    """Bench both heads on the shipped HumanEval and GSM8K prompts; print the table, keep report and plot."""
    prompts = _bench_prompts(target)
    _say(f"6/6 bench: up to {len(prompts)} prompts of HumanEval and GSM8K, {BENCH_TOKENS} tokens each")
    policies = {name: (head, load_policy(folder / name / "head", target.dtype)) for name, head in heads.items()}
    unfinished = Unfinished("bench", _identity([folder / name / "head" for name in heads], prompts), folder)
    progress = Progress("bench: prompts", len(prompts) - len(unfinished.done), seconds=seconds)
    report = bench(
        target,
        policies,
        prompts,
        Settings(max_new_tokens=BENCH_TOKENS),
        seconds=seconds,
        on_progress=progress.add,
        unfinished=unfinished,
    )
    count = report["prompts"]["count"]
    progress.close(f"bench: {count} of {len(prompts)} prompts, {progress.tokens} tokens in {progress.elapsed:.0f} s")
    save_report(report, folder / "report.json")
    print_report(report)
    save_plot(report, folder / "report.png")
    if report["prompts"]["interrupted"]:
        raise KeyboardInterrupt
    unfinished.finish()
    return report


def _identity(heads: list[Path], prompts: Sequence[Any]) -> dict[str, Any]:
    """Return what a tree or a bench of these heads depends on."""
    files = [path for head in heads for path in (head / WEIGHTS, head / TREE) if path.is_file()]
    return {"files": [file_identity(path) for path in files], "prompts": list(prompts)}


def _bench_prompts(target: Target) -> list[tuple[str, str, list[int]]]:
    from importlib.resources import files

    from headway.data.chat import prompt_ids

    assert target.tokenizer is not None
    sets = []
    for name in ("humaneval", "gsm8k"):
        source = files("headway.data") / "prompts" / f"{name}.jsonl"
        lines = source.read_text(encoding="utf-8").splitlines()[:BENCH_PROMPTS]
        sets.append([(name, json.loads(line)) for line in lines])
    out = []
    for name, row in (pair for pairs in zip(*sets, strict=True) for pair in pairs):
        ids = prompt_ids(target.tokenizer, [{"role": "user", "content": row["turns"][0]}])
        out.append((str(row["question_id"]), name, ids))
    return out


class _Stages:
    """Which stages are done, in how many seconds, and what was chosen once; kept in a small file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Any] = read_json(path) if path.is_file() else {}

    def run(self, name: str, work: Callable[[], Any]) -> None:
        """Do a stage unless it is done; remember how long it took."""
        if name in self.done:
            _say(f"{name}: done before, in {self.done[name]:.0f} s")
            return
        _say(name)
        begin = perf_counter()
        work()
        self._add(name, round(perf_counter() - begin, 1))

    def keep(self, name: str, choose: Callable[[], Any]) -> Any:
        """Return what was chosen in the first run of this folder, choosing it now if this is the first."""
        if name not in self.done:
            self._add(name, choose())
        return self.done[name]

    def _add(self, name: str, value: Any) -> None:
        self.done[name] = value
        write_json(self.path, self.done)


def _say(text: str) -> None:
    print(f"demo: {text}", flush=True)

"""Trains a head on the features of a frozen target: everything is set up in `prepare`, then one loop, read top to bottom.

Letters: B batch, T positions, S draft steps.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn

from headway.data.dialogs import read_dialogs, read_manifest
from headway.heads.common.checkpoint import read_config, save_head
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, Head, LossReport, find_family
from headway.heads.common.vocab import choose_draft_vocab
from headway.inference.tree import Policy, check_policy, parse_policy
from headway.train.batches import Order, Rows, count_tokens, make_batches, make_rows
from headway.train.config import TrainConfig
from headway.train.evaluate import choose_prompts, evaluate_accepted_length, evaluate_agreement
from headway.train.features import Features, choose_cache
from headway.train.progress import Line
from headway.train.run_folder import Progress, RunFolder, sha256_of
from headway.train.schedule import learning_rate, steps_by_count, steps_by_time

if TYPE_CHECKING:
    from headway.inference.target import Target

OVERRUN = 1.25
"""A run with max_seconds ends early once it took this much more: the machine became slower than it was measured."""


class Interrupted(Exception):
    """Ctrl-C was pressed; the state is saved."""


class Step(nn.Module):
    """A head whose forward is its loss, because data-parallel wrappers see forward only."""

    def __init__(self, head: Head, autocast: bool) -> None:
        super().__init__()
        self.head = head
        self.autocast = autocast

    def forward(self, batch: Batch) -> LossReport:
        with torch.autocast(batch.token_BT.device.type, torch.bfloat16, enabled=self.autocast):
            return self.head.loss(batch)


@dataclass
class Run:
    """What a run works with."""

    config: TrainConfig
    accelerator: Accelerator
    folder: RunFolder
    target: Target
    head: Head
    model: nn.Module
    """The head's loss, wrapped by accelerate."""
    optimizer: Any
    train: Features
    held_out: Features
    rows: Rows
    policy: Policy | None
    manifest: dict[str, Any]
    total_steps: int
    progress: Progress


def train(config: TrainConfig, *, argv: Sequence[str] = (), target: Target | None = None) -> dict[str, Any]:
    """Train a head, or continue the run in `config.out`, and return the final figures; the head is in `out/head`.

    `target` saves loading it again. Raises HeadwayError for bad input, before anything is written, and for a loss that is
    not finite; Interrupted after Ctrl-C, with a state that the same call continues from.
    """
    done_before = finished(config)
    if done_before is not None:
        say(f"the run in {config.out} is finished; its head is in {RunFolder(config.out).head}")
        return done_before
    run = prepare(config, argv, target)
    accelerator, progress, folder = run.accelerator, run.progress, run.folder
    order = Order(len(run.train.batches), config.seed)
    batches_per_step = config.grad_accum * accelerator.num_processes
    line = Line(run.total_steps, config.max_seconds, show=accelerator.is_main_process)
    resumed_at, saved_at = progress.step, progress.step if progress.step else -1
    metrics: dict[str, Any] = {}
    with interruptible() as interrupted:
        while True:
            overrun = config.max_seconds is not None and progress.seconds > OVERRUN * config.max_seconds
            done = progress.step >= run.total_steps or overrun
            asked = agree(accelerator, interrupted.is_set())

            # evaluate
            due = config.eval_every > 0 and progress.step % config.eval_every == 0 and progress.step > resumed_at
            if (due or done) and not asked:
                metrics = evaluate(run, interrupted)
                asked = agree(accelerator, interrupted.is_set())

            # checkpoint
            due = config.save_every > 0 and progress.step % config.save_every == 0 and progress.step > resumed_at
            if (due or done or asked) and progress.step != saved_at:
                save_state(run)
                saved_at = progress.step

            # stop
            if asked:
                raise Interrupted(f"stopped at step {progress.step} of {run.total_steps}; the same command continues")
            if done:
                break

            # step
            begin = time.perf_counter()
            lr = learning_rate(config, progress.step, run.total_steps)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            reports: list[LossReport] = []
            for i in range(config.grad_accum):
                n = progress.step * batches_per_step + i * accelerator.num_processes + accelerator.process_index
                batch = run.train[order[n]]
                last = i == config.grad_accum - 1
                with nullcontext() if last else accelerator.no_sync(run.model):
                    report = run.model(batch)
                    if supervised(report):
                        reports.append(report)
                    # A batch without goals has loss zero; it still takes part, so that no process waits for another.
                    accelerator.backward(report.loss / config.grad_accum)
            for report in reports:
                refuse_non_finite(run, "loss", report.loss.detach())
            norm = accelerator.clip_grad_norm_(run.model.parameters(), config.clip or math.inf)
            refuse_non_finite(run, "gradient norm", norm)
            if anywhere(accelerator, bool(reports)):
                run.optimizer.step()
            run.optimizer.zero_grad(set_to_none=True)

            # log
            seconds = time.perf_counter() - begin
            figures = summarise_reports(reports)
            row = {"step": progress.step + 1, "lr": lr, "grad_norm": float(norm), **figures}

            # advance
            progress.step += 1
            progress.tokens += figures["tokens"]
            progress.seconds += seconds
            progress.skipped += config.grad_accum - len(reports)
            line.add(progress, figures)
            if progress.step % config.log_every == 0:
                log(run, {**row, "total_tokens": progress.tokens, "seconds": round(progress.seconds, 3)})
    line.close()
    return finish(run, metrics)


def finished(config: TrainConfig) -> dict[str, Any] | None:
    """Return the figures of the run in `config.out` if all its steps are done and its head is saved, otherwise None.

    Raises HeadwayError when the folder holds another run.
    """
    read_manifest(config.dialogs)
    folder = RunFolder(config.out)
    run = folder.check(config, sha256_of(Path(config.dialogs) / "dialogs.jsonl"))
    if run is None or run["total_steps"] is None or folder.newest_step() != run["total_steps"]:
        return None
    return read_config(folder.head)["metrics"] if folder.head.is_dir() else None


def prepare(config: TrainConfig, argv: Sequence[str], target: Target | None) -> Run:
    """Return a run ready to step: target, head, rows, optimizer, schedule, and the newest state if there is one."""
    manifest, dialogs = read_manifest(config.dialogs), read_dialogs(config.dialogs)
    rows = make_rows(dialogs, config.max_length, config.eval_fraction, config.eval_rows)
    tree = None if config.tree == "auto" else parse_policy(config.tree)
    accelerator = make_accelerator(config)
    if target is None:
        from headway.inference.target import Target

        target = Target.load(
            config.target, dtype=config.dtype, device=str(accelerator.device), revision=config.revision
        )
    check_manifest(manifest, target, config)
    torch.manual_seed(config.seed)
    head = make_head(config, target, rows).to(accelerator.device)
    if tree is not None:
        check_policy(tree, head.max_depth)

    folder = RunFolder(config.out)
    total_steps = (folder.read_run() or {}).get("total_steps")
    if accelerator.is_main_process and folder.read_run() is None:
        folder.create(config, argv, manifest, sha256_of(Path(config.dialogs) / "dialogs.jsonl"))
    accelerator.wait_for_everyone()
    batches = make_batches(rows.train, config.tokens_per_batch)
    by_count = steps_by_count(config, config.grad_accum * accelerator.num_processes, len(batches))
    train = Features(target, head.config.taps, batches)
    repeats = by_count is None or by_count * config.grad_accum * accelerator.num_processes > len(batches)
    kept, why = choose_cache(config.cache, train.num_bytes, repeats)
    train = Features(target, head.config.taps, batches, kept, folder.path / "cache")
    held_out_kept = "off" if kept == "off" else "memory"
    held_out = Features(target, head.config.taps, make_batches(rows.held_out, config.tokens_per_batch), held_out_kept)

    optimizer = make_optimizer(config, head)
    model, optimizer = accelerator.prepare(Step(head, config.autocast), optimizer)
    progress = folder.load(head, optimizer) or Progress()
    if total_steps is None and accelerator.is_main_process:
        total_steps = by_count
        if config.max_seconds is not None and progress.step == 0:
            by_time = steps_by_time(config, train, lambda batch: trial(accelerator, model, optimizer, batch))
            total_steps = min(by_time, by_count or by_time)
        folder.fix_total(int(total_steps or 1))
    [total_steps] = broadcast_object_list([total_steps])
    assert total_steps is not None
    if accelerator.is_main_process:
        folder.rewind_log(progress.step)
        say_plan(head, rows, train, why, total_steps, progress)
    if config.tracker != "none":
        accelerator.init_trackers("headway", config=flat(config))
    return Run(
        config, accelerator, folder, target, head, model, optimizer, train, held_out, rows, tree, manifest,
        total_steps, progress,
    )  # fmt: skip


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Return the accelerator, refusing what is not there or not supported."""
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise HeadwayError(
            f"tracker is {config.tracker!r}, which is not installed; run `pip install headway[{config.tracker}]` or set "
            "tracker=none"
        )
    trackers = None if config.tracker == "none" else [config.tracker]
    accelerator = Accelerator(log_with=trackers, project_dir=config.out if trackers else None)
    supported = (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU)
    if accelerator.distributed_type not in supported:
        raise HeadwayError(
            f"accelerate was configured for {accelerator.distributed_type.value}; heads train on one process or with plain "
            "data parallelism (MULTI_GPU), they are small; choose that in the accelerate config"
        )
    return accelerator


def check_manifest(manifest: dict[str, Any], target: Target, config: TrainConfig) -> None:
    """Raise HeadwayError when the dialogs were written with another vocabulary than the target's."""
    size = manifest.get("vocab_size")
    if size is not None and size > target.info.vocab_size:
        made_by = manifest.get("target", "another target")
        raise HeadwayError(
            f"dialogs {config.dialogs} were made by {made_by} with {size} token ids, target {target.info.name} has "
            f"{target.info.vocab_size}; distil with the target that the head is for"
        )


def make_head(config: TrainConfig, target: Target, rows: Rows) -> Head:
    """Return a head with its draft vocabulary chosen and its weights warm-started."""
    config_class, head_class = find_family(config.family)
    head = head_class(config_class.for_target(target.info, **config.head), target.frozen)
    size = getattr(head.config, "draft_vocab_size", 0)
    if size:
        counts = count_tokens(rows.train, target.info.vocab_size)
        head.set_draft_vocab(choose_draft_vocab(counts, size, target.info.num_tokens, always_keep=target.eos_ids))
    head.warm_start()
    return head.float()


def make_optimizer(config: TrainConfig, head: Head) -> torch.optim.AdamW:
    """Return AdamW over what is trainable; weight decay falls on matrices only."""
    parameters = [p for p in head.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas)


def trial(accelerator: Accelerator, model: nn.Module, optimizer: Any, batch: Batch) -> None:
    """Do a whole step at learning rate zero and forget it, to time it."""
    module = accelerator.unwrap_model(model)
    module(batch).loss.backward()
    accelerator.clip_grad_norm_(module.parameters(), 1.0)
    raw = getattr(optimizer, "optimizer", optimizer)
    for group in raw.param_groups:
        group["lr"] = 0.0
    raw.step()
    raw.state.clear()
    raw.zero_grad(set_to_none=True)


def supervised(report: LossReport) -> bool:
    """Return whether anything in the batch was a goal."""
    return int(report.count_S.sum()) > 0


def refuse_non_finite(run: Run, what: str, value: Tensor | float | None) -> None:
    """Raise HeadwayError, before the optimizer step, unless the value is finite."""
    if value is not None and not math.isfinite(float(value)):
        raise HeadwayError(
            f"the {what} is {float(value)} at step {run.progress.step + 1}; the weights are those before it. Lower lr, or "
            "set dtype=float32 and autocast=false, in a new run folder: out=..."
        )


def summarise_reports(reports: list[LossReport]) -> dict[str, Any]:
    """Return loss, agreement per step and goals of the batches of a step on this process."""
    if not reports:
        return {"loss": 0.0, "agreement_S": [], "tokens": 0}
    agreement = torch.stack([r.agreement_S for r in reports]).float().mean(0)
    return {
        "loss": float(torch.stack([r.loss.detach() for r in reports]).mean()),
        "agreement_S": [round(a, 4) for a in agreement.tolist()],
        "tokens": sum(int(r.count_S[0]) for r in reports),
    }


def evaluate(run: Run, interrupted: threading.Event) -> dict[str, Any]:
    """Return the figures on held-out rows; the main process computes them, the others wait."""
    metrics: dict[str, Any] = {}
    config = run.config
    if run.accelerator.is_main_process and run.rows.held_out:
        run.head.eval()
        held_out = (run.held_out[i] for i in range(len(run.held_out.batches)))
        metrics = {f"held_out_{k}": v for k, v in evaluate_agreement(run.head, held_out).items()}
        room = run.target.max_positions - config.eval_tokens
        prompts = choose_prompts(run.rows.held_out, config.eval_prompts, room)
        if prompts and not interrupted.is_set():
            accepted = evaluate_accepted_length(
                run.target,
                run.head,
                run.policy,
                prompts,
                max_new_tokens=config.eval_tokens,
                stop=interrupted.is_set,
            )
            metrics |= {"accepted_length": accepted["accepted_length"], "accepted_prompts": accepted["prompts"]}
        run.head.train()
        say(f"step {run.progress.step}: {spell(metrics)}")
        log(
            run,
            {
                "step": run.progress.step,
                **metrics,
                "total_tokens": run.progress.tokens,
                "seconds": round(run.progress.seconds, 3),
            },
        )
    run.accelerator.wait_for_everyone()
    return metrics


def save_state(run: Run) -> None:
    """Write a state to continue from."""
    if run.accelerator.is_main_process:
        run.folder.save(run.progress, run.head, run.optimizer)
    run.accelerator.wait_for_everyone()


def finish(run: Run, metrics: dict[str, Any]) -> dict[str, Any]:
    """Save the head with its figures and return them."""
    metrics = {
        **metrics,
        "steps": run.progress.step,
        "trained_tokens": run.progress.tokens,
        "train_seconds": round(run.progress.seconds, 1),
        "skipped_batches": run.progress.skipped,
    }
    if run.accelerator.is_main_process:
        data = {
            "dialogs": len(run.rows.train) + len(run.rows.held_out),
            "held_out": len(run.rows.held_out),
            "supervised_tokens": sum(row.num_goals for row in run.rows.train),
            "written_by": run.manifest.get("target", run.target.info.name),
            "dialogs_sha256": (run.folder.read_run() or {}).get("dialogs_sha256"),
        }
        save_head(run.head, run.folder.head, target=run.target.info, metrics=metrics, data=data)
        shutil.rmtree(run.folder.path / "cache", ignore_errors=True)
        if run.progress.skipped:
            say(f"{run.progress.skipped} batches had no supervised token and were skipped")
        say(f"head saved in {run.folder.head}")
    if run.config.tracker != "none":
        run.accelerator.end_training()
    run.accelerator.wait_for_everyone()
    return metrics


def log(run: Run, row: dict[str, Any]) -> None:
    """Append to log.jsonl and send to the tracker."""
    if not run.accelerator.is_main_process:
        return
    run.folder.log(row)
    if run.config.tracker != "none":
        numbers = {k: v for k, v in row.items() if isinstance(v, int | float)}
        lists = {f"{k}/{i}": x for k, v in row.items() if isinstance(v, list) for i, x in enumerate(v)}
        run.accelerator.log({**numbers, **lists}, step=row["step"])


def say_plan(head: Head, rows: Rows, train: Features, why: str, total_steps: int, progress: Progress) -> None:
    """Say what the run is about to do, and what was left out."""
    size = sum(p.numel() for p in head.parameters() if p.requires_grad)
    say(f"{size / 1e6:.1f} M trainable weights, taps {list(head.config.taps)}")
    say(
        f"{len(rows.train)} rows to train on in {len(train.batches)} batches, {len(rows.held_out)} held out, "
        f"{rows.num_cut} cut to the longest length, {rows.num_without_goal} left out without a supervised token"
    )
    vocab = head.draft_vocab
    if vocab is not None:
        counts = count_tokens(rows.train, head.frozen.info.vocab_size)
        covered = float(counts[vocab.cpu()].sum() / counts.sum().clamp_min(1))
        say(f"draft vocabulary of {vocab.numel()} words covers {covered:.1%} of the supervised tokens")
    say(why)
    say(f"{total_steps} steps" + (f", continuing after step {progress.step}" if progress.step else ""))


def say(text: str) -> None:
    """Print a line on stderr."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}train: {text}", file=sys.stderr, flush=True)


def spell(metrics: dict[str, Any]) -> str:
    """Return figures as one line."""
    parts = []
    for key, value in metrics.items():
        if isinstance(value, list):
            parts.append(f"{key} {'/'.join(f'{v:.3f}' for v in value)}")
        else:
            parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(parts)


def flat(config: TrainConfig) -> dict[str, Any]:
    """Return the recipe as trackers take it: plain values under dotted names."""
    fields = config.to_json()
    head = fields.pop("head")
    values = {**fields, **{f"head.{k}": v for k, v in head.items()}}
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in values.items()}


def anywhere(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether the flag is set on any process."""
    if accelerator.num_processes == 1:
        return flag
    count: Tensor = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device))  # type: ignore[assignment]
    return float(count) > 0


agree = anywhere


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Inside, Ctrl-C sets the event, and a second one interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        os.write(2, b"\ntrain: finishing the step, then saving (Ctrl-C again stops at once)\n")

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)

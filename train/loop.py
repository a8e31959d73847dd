"""Trains a head on the features of a frozen target: one loop, read top to bottom; `setup.prepare` comes before it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from torch import Tensor

from headway.heads.common.checkpoint import save_head
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.protocol import Head, LossReport
from headway.train.batches import Order
from headway.train.config import TrainConfig
from headway.train.evaluate import choose_prompts, evaluate_accepted_length, evaluate_agreement
from headway.train.features import Memory
from headway.train.joint import FOLDER as ADAPTER
from headway.train.joint import take_off
from headway.train.lora import plain_state, split
from headway.train.progress import Line, say
from headway.train.run_folder import RunFolder
from headway.train.schedule import learning_rate
from headway.train.setup import Run, finished, prepare
from headway.train.trackers import end_tracking, send

if TYPE_CHECKING:
    from headway.inference.target import Target

OVERRUN = 1.25
"""A run with max_seconds ends early once it took this much more: the machine became slower than it was measured."""


def train(
    config: TrainConfig, *, argv: Sequence[str] = (), target: Target | None = None, shared: Memory | None = None
) -> dict[str, Any]:
    """Train a head, or continue the run in `config.out`, and return the final figures; the head is in `out/head`.

    `target` saves loading it again; `shared` lets runs in one process use one another's features.

    Raises HeadwayError for bad input, before anything is written, and for a loss that
    is not finite; Interrupted after Ctrl-C, with a state that the same call continues from.
    """
    done_before = finished(config)
    if done_before is not None:
        say(f"the run in {config.out} is finished; its head is in {RunFolder(config.out).head}")
        remove_cache(RunFolder(config.out))  # of a run that was killed between its head and this
        return done_before
    folder = RunFolder(config.out)
    run: Run | None = None
    try:
        run = prepare(config, argv, target, shared, folder)
        return steps(run)
    finally:
        if run is not None:
            run.train.close()
            end_tracking(run.accelerator)
        if target is not None:
            take_off(target)
        folder.release()


def steps(run: Run) -> dict[str, Any]:
    """Do the steps of a run, save its head and return the final figures."""
    config, accelerator, progress = run.config, run.accelerator, run.progress
    order = Order(len(run.train.batches), config.seed)
    line = Line(run.total_steps, show=accelerator.is_main_process)
    resumed_at, saved_at = progress.step, progress.step if progress.step else -1
    metrics: dict[str, Any] = {}
    with interruptible() as interrupted:
        while True:
            overrun = config.max_seconds is not None and progress.seconds > OVERRUN * config.max_seconds
            done = progress.step >= run.total_steps or anywhere(accelerator, overrun)
            asked = anywhere(accelerator, interrupted.is_set())
            fresh = progress.step > resumed_at  # the state of the step resumed at is there already
            evaluated = progress.step == progress.evaluated_at

            # evaluate
            if (done or (is_due(progress.step, config.eval_every) and not evaluated)) and not asked:
                metrics = evaluate(run, interrupted, logged=evaluated)
                asked = anywhere(accelerator, interrupted.is_set())
                progress.evaluated_at = progress.evaluated_at if asked else progress.step

            # checkpoint
            if (done or asked or (fresh and is_due(progress.step, config.save_every))) and progress.step != saved_at:
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
            if run.joint is not None:
                run.joint.begin(progress.step, run.total_steps, lr, run.optimizer)
            reports = accumulate(run, order)
            for report in reports:
                refuse_non_finite(run, "loss", report.loss.detach())
            norm = accelerator.clip_grad_norm_(run.model.parameters(), config.clip or math.inf)
            refuse_non_finite(run, "gradient norm", norm)
            if anywhere(accelerator, bool(reports)):
                run.optimizer.step()
                if run.average is not None:
                    run.average.update(run.weights, progress.step)
            run.optimizer.zero_grad(set_to_none=True)

            # log
            seconds = time.perf_counter() - begin
            figures = summarise(reports)
            tokens, skipped = everywhere(accelerator, figures["tokens"], config.grad_accum - len(reports))
            if is_due(progress.step + 1, config.log_every):
                pace = line.pace(progress, tokens, seconds)
                log(
                    run,
                    {"step": progress.step + 1, "lr": lr, "grad_norm": float(norm or 0.0), **figures, **pace},
                    seconds,
                )

            # advance
            progress.step += 1
            progress.tokens += tokens
            progress.seconds += seconds
            progress.skipped += skipped
            line.add(progress, figures)
    line.close()
    return finish(run, metrics)


def accumulate(run: Run, order: Order) -> list[LossReport]:
    """Run the batches of a step forward and backward; return the reports of those that had a goal."""
    accelerator, grad_accum = run.accelerator, run.config.grad_accum
    reports = []
    for i in range(grad_accum):
        n = (run.progress.step * grad_accum + i) * accelerator.num_processes + accelerator.process_index
        batch = run.train.take(order[n], then=order[n + accelerator.num_processes])
        with nullcontext() if i == grad_accum - 1 else accelerator.no_sync(run.model):
            report = run.model(batch)
            if supervised(report):
                reports.append(report)
            # A batch without goals has loss zero; it still takes part, so that no process waits for another.
            accelerator.backward(report.loss / grad_accum)
    return reports


def is_due(step: int, every: int) -> bool:
    """Return whether `step` is a multiple of `every`; with 0 none is."""
    return every > 0 and step % every == 0


def supervised(report: LossReport) -> bool:
    """Return whether anything in the batch was a goal."""
    return int(report.count_S.sum()) > 0


def refuse_non_finite(run: Run, what: str, value: Tensor | float | None) -> None:
    """Raise HeadwayError, before the optimizer step, unless the value is finite."""
    if value is not None and not math.isfinite(float(value)):
        raise HeadwayError(
            f"the {what} is {float(value)} at step {run.progress.step + 1}; the weights are those before it. Lower lr, "
            "or set dtype=float32 and autocast=false, in a new run folder: out=..."
        )


def summarise(reports: list[LossReport]) -> dict[str, Any]:
    """Return loss, agreement per step and goals of the batches of a step on this process."""
    if not reports:
        return {"loss": 0.0, "agreement_S": [], "tokens": 0}
    agreement = torch.stack([r.agreement_S for r in reports]).float().mean(0)
    return {
        "loss": float(torch.stack([r.loss.detach() for r in reports]).mean()),
        "agreement_S": [round(a, 4) for a in agreement.tolist()],
        "tokens": sum(int(r.count_S[0]) for r in reports),
        **{name: float(torch.stack([r.figures[name] for r in reports]).mean()) for name in reports[0].figures},
    }


def evaluate(run: Run, interrupted: threading.Event, *, logged: bool = False) -> dict[str, Any]:
    """Return the figures on held-out rows; the main process computes them, the others wait. `logged` ones are in the log."""
    metrics: dict[str, Any] = {}
    begin = time.perf_counter()
    if run.accelerator.is_main_process and run.rows.held_out:
        run.head.eval()
        run.train.settle()
        with result_weights(run):
            metrics = held_out_figures(run, interrupted)
        run.head.train()
        metrics["held_out_seconds"] = round(time.perf_counter() - begin, 3)
        run.progress.eval_seconds += metrics["held_out_seconds"]
        if not interrupted.is_set():  # cut short, it is done again when the run is continued
            say(f"step {run.progress.step}: {spell(metrics)}")
            if not logged:  # by the run before it was killed, at its end, where the figures are needed again
                log(run, {"step": run.progress.step, **metrics})
    run.accelerator.wait_for_everyone()
    return metrics


def held_out_figures(run: Run, interrupted: threading.Event) -> dict[str, Any]:
    """Return loss, agreement and accepted length of the head as it is, on held-out rows."""
    config = run.config
    held_out = (run.held_out[i] for i in range(len(run.held_out.batches)))
    metrics = {f"held_out_{k}": v for k, v in evaluate_agreement(run.joint or run.head, held_out).items()}
    room = run.target.max_positions - config.eval_tokens
    prompts = choose_prompts(run.rows.held_out, config.eval_prompts, room)
    since = time.perf_counter()
    if prompts and not interrupted.is_set():
        accepted = evaluate_accepted_length(
            run.target,
            beside_target(run),
            run.policy,
            prompts,
            max_new_tokens=config.eval_tokens,
            batch_size=len(prompts),
            stop=interrupted.is_set,
        )
        metrics |= {"accepted_length": accepted["accepted_length"], "accepted_prompts": accepted["prompts"]}
        metrics["accepted_seconds"] = round(time.perf_counter() - since, 3)
    return metrics


def result_weights(run: Run) -> AbstractContextManager[None]:
    """Inside, the head has the weights that the run would leave: their average where one is kept."""
    return nullcontext() if run.average is None else run.average.instead(run.weights)


def beside_target(run: Run) -> Head:
    """Return the head for decoding: on the target's device."""
    if run.config.target_device is None:
        return run.head
    twin = type(run.head)(run.head.config, run.target.frozen)
    twin.load_state_dict(plain_state(run.head))
    return twin.to(run.target.device)


def save_state(run: Run) -> None:
    """Write a state to continue from."""
    if run.accelerator.is_main_process:
        run.folder.save(run.progress, run.weights, run.optimizer, run.average)
    run.accelerator.wait_for_everyone()


def finish(run: Run, metrics: dict[str, Any]) -> dict[str, Any]:
    """Save the head with its figures and return them."""
    metrics = {
        **metrics,
        "steps": run.progress.step,
        "trained_tokens": run.progress.tokens,
        "train_seconds": round(run.progress.seconds, 1),
        "eval_seconds": round(run.progress.eval_seconds, 1),
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
        with result_weights(run):
            head, more = split(run.head, run.config)
            info = run.target.info
            if run.joint is not None:  # first: where there is a head, there is its adapter
                info, more["joint"] = run.joint.save(run.folder.path / ADAPTER, metrics)
            save_head(head, run.folder.head, target=info, metrics=metrics, data=data, **more)
        remove_cache(run.folder)
        if run.progress.skipped:
            say(f"{run.progress.skipped} batches had no supervised token and were skipped")
        say(f"head saved in {run.folder.head}")
    run.accelerator.wait_for_everyone()
    return metrics


def remove_cache(folder: RunFolder) -> None:
    """Remove the features of a run that is finished."""
    shutil.rmtree(folder.path / "cache", ignore_errors=True)


def log(run: Run, figures: dict[str, Any], seconds: float = 0.0) -> None:
    """Append figures to log.jsonl and send them to the tracker; a step that is not counted yet gives its seconds."""
    if not run.accelerator.is_main_process:
        return
    total_tokens = run.progress.tokens + figures.get("tokens", 0)
    row = {**figures, "total_tokens": total_tokens, "seconds": round(run.progress.seconds + seconds, 3)}
    run.folder.log(row)
    if run.config.tracker != "none":
        send(run.accelerator, row)


def spell(metrics: dict[str, Any]) -> str:
    """Return figures as one line."""
    parts = []
    for key, value in metrics.items():
        if isinstance(value, list):
            parts.append(f"{key} {'/'.join(f'{v:.3f}' for v in value)}")
        else:
            parts.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
    return ", ".join(parts)


def everywhere(accelerator: Accelerator, *counts: int) -> list[int]:
    """Return the sums of the counts over all processes."""
    if accelerator.num_processes == 1:
        return list(counts)
    sums: Tensor = accelerator.reduce(torch.tensor(counts, device=accelerator.device))  # type: ignore[assignment]
    return [int(n) for n in sums]


def anywhere(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether the flag is set on any process."""
    if accelerator.num_processes == 1:
        return flag
    count: Tensor = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device))  # type: ignore[assignment]
    return float(count) > 0


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

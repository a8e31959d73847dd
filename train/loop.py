"""Trains a head on the features of a frozen target: one loop, read top to bottom; `setup.prepare` comes before it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import pairwise
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from headway.heads.common.checkpoint import save_head
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.protocol import Batch, Head, LossReport
from headway.inference.host import clock
from headway.train.batches import Order
from headway.train.compiled import Compiled
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

ECHO = 2.0
"""Seconds in which another Ctrl-C is taken for the first one, which launchers hand on to the processes that had it already."""


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
    with interruptible(accelerator.is_main_process) as interrupted:
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
            begin = clock()
            lr = learning_rate(config, progress.step, run.total_steps)
            for group in run.optimizer.param_groups:
                group["lr"] = lr
            if run.joint is not None:
                run.joint.begin(progress.step, run.total_steps, lr, run.optimizer)
            reports, skipped_here = accumulate(run, order)
            figures = summarise(accelerator, reports, skipped_here)
            norm = accelerator.clip_grad_norm_(run.model.parameters(), config.clip or math.inf)
            refuse_non_finite(run, "gradient norm", norm)
            if figures["tokens"]:
                run.optimizer.step()
                run.gathered.update_average(progress.step)
            run.optimizer.zero_grad(set_to_none=True)

            # log
            seconds = clock() - begin
            tokens, skipped = figures["tokens"], figures.pop("skipped")
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


def accumulate(run: Run, order: Order) -> tuple[list[LossReport], int]:
    """Run this process's batches of a step forward and backward; return their reports and how many of them had no goal.

    The gradient is that of the mean over the supervised tokens of the whole step: each batch's loss is its share of it.
    """
    accelerator, turns = run.accelerator, run.turns
    numbers = [run.number(turn) for turn in range(turns + 1)]
    count_S = count_labels(run, order, numbers[:turns])
    reports, skipped = [], 0
    for turn, (n, after) in enumerate(pairwise(numbers)):
        batch = replace(take(run, place(order, n), then=place(order, after)), whole_count_S=count_S)
        if n is None:  # it still takes part, so that no process waits for another
            batch = replace(batch, supervised_BT=torch.zeros_like(batch.supervised_BT))
        with between(accelerator, run.model, last=turn == turns - 1):
            begin_draws(run, n)
            report = LossReport(*run.model(batch))
            refuse_non_finite(run, "loss", report.loss.detach())
            skipped += n is not None and not int(report.count_S.sum())
            reports.append(report)
            # The engines take the mean over the processes, and DeepSpeed over the turns; this is a sum.
            means = turns if accelerator.distributed_type == DistributedType.DEEPSPEED else 1
            accelerator.backward(report.loss * (accelerator.num_processes * means))
    return reports, skipped


def take(run: Run, n: int, then: int) -> Batch:
    """Return batch n. A split target is asked by all processes when one of them needs it."""
    if run.config.shard_target:
        needed = run.train.needs_target(n)
        if anywhere(run.accelerator, needed) and not needed:
            run.train.pass_along(n)
    return run.train.take(n, then)


def place(order: Order, number: int | None) -> int:
    """Return which batch has that number; without one the shortest, which takes the least time."""
    return 0 if number is None else order[number]


def count_labels(run: Run, order: Order, numbers: Sequence[int | None]) -> Tensor | None:
    """Return over how many labels the means of a step go, int64 [S]; None where each step is one batch, which counts itself.

    `numbers` are the batches of this process.
    """
    if run.batches_per_step == 1:
        return None
    whole_S = torch.zeros(run.config.max_length, dtype=torch.long, device=run.accelerator.device)
    for n in numbers:
        if n is not None:
            begin_draws(run, n)
            count_S = run.head.count_labels(run.train.supervised(order[n]))
            whole_S[: len(count_S)] += count_S
    return run.accelerator.reduce(whole_S) if run.accelerator.num_processes > 1 else whole_S  # type: ignore[return-value]


def begin_draws(run: Run, n: int | None) -> None:
    """Seed what batch number n draws (noise, dropout, anchors), so that no matter which process runs it, and after what.

    Where a step is one batch they go on from the last one's.
    """
    if n is not None and run.batches_per_step > 1:
        torch.manual_seed(((run.config.seed << 32) + 1 + n) % (1 << 63))


@contextmanager
def between(accelerator: Accelerator, model: nn.Module, *, last: bool) -> Iterator[None]:
    """Inside, gradients are kept for later turns; in the last turn of a step they are averaged over the processes."""
    accelerator.sync_gradients = last
    with nullcontext() if last else accelerator.no_sync(model):
        yield


def is_due(step: int, every: int) -> bool:
    """Return whether `step` is a multiple of `every`; with 0 none is."""
    return every > 0 and step % every == 0


def refuse_non_finite(run: Run, what: str, value: Tensor | float | None) -> None:
    """Raise HeadwayError, before the optimizer step, unless the value is finite."""
    if value is not None and not math.isfinite(float(value)):
        raise HeadwayError(
            f"the {what} is {float(value)} at step {run.progress.step + 1}; the weights are those before it. Lower lr, "
            "or set dtype=float32 and autocast=false, in a new run folder: out=..."
        )


def summarise(accelerator: Accelerator, reports: list[LossReport], skipped: int) -> dict[str, Any]:
    """Return loss, agreement per step, goals, batches without one, and what figures the loss reports beside, of a step over
    all processes."""
    exact = torch.float32 if accelerator.device.type == "mps" else torch.float64
    loss = torch.stack([r.loss.detach() for r in reports]).to(exact).sum()
    count_S = torch.stack([r.count_S for r in reports]).to(exact).sum(0)
    hits_S = torch.stack([r.agreement_S.to(exact) * r.count_S for r in reports]).sum(0)
    names = list(reports[0].figures)
    beside = [torch.stack([r.figures[name].to(exact) * r.count_S[0] for r in reports]).sum() for name in names]
    parts = torch.cat([torch.stack([loss, loss.new_tensor(skipped), *beside]), count_S, hits_S])
    if accelerator.num_processes > 1:
        parts = accelerator.reduce(parts)  # type: ignore[assignment]
    loss_sum, skipped_sum, *rest = parts.tolist()
    sums, rest = rest[: len(names)], rest[len(names) :]
    count, hits = rest[: len(count_S)], rest[len(count_S) :]
    agreement = [round(h / c, 4) if c else 0.0 for h, c in zip(hits, count, strict=True)]
    figures = {name: total / max(1.0, count[0]) for name, total in zip(names, sums, strict=True)}
    tokens = int(count[0])
    return {"loss": loss_sum, "agreement_S": agreement, "tokens": tokens, "skipped": int(skipped_sum), **figures}


def evaluate(run: Run, interrupted: threading.Event, *, logged: bool = False) -> dict[str, Any]:
    """Return the figures on held-out rows; `logged` ones are in the log. The main process computes them and the others wait;
    a split target all ask together, and alike."""
    metrics: dict[str, Any] = {}
    begin = time.perf_counter()
    main, together = run.accelerator.is_main_process, run.config.shard_target
    with run.gathered.result(bool(run.rows.held_out) and (main or together)) as head:
        if head is not None:
            head.eval()
            run.train.settle()
            metrics = held_out_figures(run, head, (lambda: False) if together else interrupted.is_set)
            head.train()
            metrics["held_out_seconds"] = round(time.perf_counter() - begin, 3)
            run.progress.eval_seconds += metrics["held_out_seconds"]
    if metrics and main and not interrupted.is_set():  # cut short, it is done again when the run is continued
        say(f"step {run.progress.step}: {spell(metrics)}")
        if not logged:  # by the run before it was killed, at its end, where the figures are needed again
            log(run, {"step": run.progress.step, **metrics})
    run.accelerator.wait_for_everyone()
    return metrics


def held_out_figures(run: Run, head: Head, stop: Callable[[], bool]) -> dict[str, Any]:
    """Return loss, agreement and accepted length of a head on held-out rows; `stop` is asked in between."""
    config = run.config
    held_out = (run.held_out[i] for i in range(len(run.held_out.batches)))
    metrics = {f"held_out_{k}": v for k, v in evaluate_agreement(run.joint or head, held_out).items()}
    room = run.target.max_positions - config.eval_tokens
    prompts = choose_prompts(run.rows.held_out, config.eval_prompts, room)
    since = time.perf_counter()
    if prompts and not stop():
        accepted = evaluate_accepted_length(
            run.target,
            beside_target(run, head),
            run.policy,
            prompts,
            max_new_tokens=config.eval_tokens,
            batch_size=len(prompts),
            stop=stop,
        )
        metrics |= {"accepted_length": accepted["accepted_length"], "accepted_prompts": accepted["prompts"]}
        metrics["accepted_seconds"] = round(time.perf_counter() - since, 3)
    return metrics


def beside_target(run: Run, head: Head) -> Head:
    """Return a head for decoding: on the target's device."""
    if run.config.target_device is None:
        return head
    twin = type(head)(head.config, run.target.frozen)
    twin.load_state_dict(plain_state(head))
    return twin.to(run.target.device)


def save_state(run: Run) -> None:
    """Write a state to continue from."""
    state = run.gathered.tensors(), run.gathered.optimizer_state(), run.gathered.average_tensors()
    if run.accelerator.is_main_process:
        run.folder.save(run.progress, *state)
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
    if isinstance(run.head.compiled, Compiled):
        metrics |= run.head.compiled.figures()
    with run.gathered.result(run.accelerator.is_main_process) as head:
        if head is not None:
            save_result(run, head, metrics)
    run.accelerator.wait_for_everyone()
    return metrics


def save_result(run: Run, head: Head, metrics: dict[str, Any]) -> None:
    """Write the head that the run leaves, and remove what only the run needed."""
    data = {
        "dialogs": len(run.rows.train) + len(run.rows.held_out),
        "held_out": len(run.rows.held_out),
        "supervised_tokens": sum(row.num_goals for row in run.rows.train),
        "written_by": run.manifest.get("target", run.target.info.name),
        "dialogs_sha256": (run.folder.read_run() or {}).get("dialogs_sha256"),
    }
    plain, more = split(head, run.config)
    info, of = run.target.info, run.weights_of
    if run.joint is not None:  # first: where there is a head, there is its adapter
        info, more["joint"] = run.joint.save(run.folder.path / ADAPTER, metrics)
    save_head(plain, run.folder.head, target=info, metrics=metrics, data=data, weights_of=of, **more)
    remove_cache(run.folder)
    if run.progress.skipped:
        say(f"{run.progress.skipped} batches had no supervised token and were skipped")
    say(f"head saved in {run.folder.head}")


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


def anywhere(accelerator: Accelerator, flag: bool) -> bool:
    """Return whether the flag is set on any process."""
    if accelerator.num_processes == 1:
        return flag
    count: Tensor = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device))  # type: ignore[assignment]
    return float(count) > 0


@contextmanager
def interruptible(show: bool = True) -> Iterator[threading.Event]:
    """Inside, Ctrl-C or SIGTERM sets the event, and says so where `show`; a later Ctrl-C interrupts at once."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    first = 0.0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not event.is_set():
            event.set()
            first = time.monotonic()
            if show:
                os.write(2, b"\ntrain: finishing the step, then saving (Ctrl-C again stops at once)\n")
        elif number == signal.SIGINT and time.monotonic() - first >= ECHO:
            raise KeyboardInterrupt

    # SIGTERM is what accelerate makes of Ctrl-C (it kills five seconds later) and what a scheduler sends.
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)

"""Everything before the first step: rows, target, head, optimizer, the number of steps, the state to continue from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from torch import Tensor, nn

from headway.data.dialogs import check_writer, read_dialogs, read_manifest
from headway.data.recorded import Recorded
from headway.heads.common.checkpoint import fingerprint, read_config
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Batch, Head, find_family
from headway.heads.common.vocab import choose_draft_vocab
from headway.inference.tree import Policy, check_policy, parse_policy
from headway.train.batches import Rows, count_tokens, make_batches, make_rows
from headway.train.compiled import SAID, Compiled, check_compile
from headway.train.config import TrainConfig
from headway.train.estimate import require_disk, require_memory
from headway.train.features import Features, Kept, Memory, choose_cache
from headway.train.gathered import Gathered, is_split
from headway.train.joint import Joint, check_joint, joint_batches
from headway.train.launch import launch
from headway.train.lora import begin_with
from headway.train.optimizers import Both, check_optimizer, make_optimizer
from headway.train.progress import say
from headway.train.provenance import data_facts
from headway.train.run_folder import Progress, RunFolder, Saved, set_rng, sha256_of
from headway.train.schedule import steps_by_count, steps_by_time
from headway.train.trackers import begin_tracking

if TYPE_CHECKING:
    from headway.inference.target import Target


class Step(nn.Module):
    """A head whose forward is its loss, because data-parallel wrappers see forward only, and in it only tuples of tensors."""

    def __init__(self, head: Head, autocast: bool) -> None:
        super().__init__()
        self.head = head
        self.autocast = autocast

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the fields of the LossReport."""
        with torch.autocast(batch.token_BT.device.type, torch.bfloat16, enabled=self.autocast):
            report = self.head.loss(batch)
        return report.loss, report.loss_S, report.agreement_S, report.count_S


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
    gathered: Gathered
    """What is trained, its optimizer and, with `ema`, the average of the weights, whole."""
    train: Features
    held_out: Features
    rows: Rows
    policy: Policy | None
    manifest: dict[str, Any]
    total_steps: int
    progress: Progress
    batches_per_step: int
    """Batches of an optimizer step, of all processes together."""
    weights_of: str | None
    """Fingerprint of a target that is split itself."""
    joint: Joint | None = None
    """The head with a LoRA on its target, where both are trained."""

    @property
    def turns(self) -> int:
        """Batches that each process runs in a step; in the last turn some may have none left."""
        return -(-self.batches_per_step // self.accelerator.num_processes)

    def number(self, turn: int) -> int | None:
        """Return the number, from the beginning of the run, of the batch that this process runs in a turn of this step or the
        next; None where none is left for it."""
        step, turn = self.progress.step + turn // self.turns, turn % self.turns
        k = turn * self.accelerator.num_processes + self.accelerator.process_index
        return step * self.batches_per_step + k if k < self.batches_per_step else None


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


def prepare(
    config: TrainConfig, argv: Sequence[str], target: Target | None, shared: Memory | None, folder: RunFolder
) -> Run:
    """Return a run ready to step: target, head, rows, optimizer, schedule, and the newest state if there is one.

    The main process holds `folder` from then on.
    """
    check_optimizer(config)
    manifest, dialogs = read_manifest(config.dialogs), read_dialogs(config.dialogs)
    rows = make_rows(dialogs, config.max_length, config.eval_fraction, config.eval_rows, config.supervise)
    tree = None if config.tree == "auto" else parse_policy(config.tree)
    accelerator = make_accelerator(config)
    saved = folder.read_run()
    check_joint(config, accelerator, target)
    batches_per_step = count_batches(saved, config, accelerator)
    target = load_target(config, accelerator, saved) if target is None else target
    check_weights(saved, target, folder)
    check_writer(manifest, target.info, config.dialogs)
    if target.max_positions < config.max_length:
        rows = make_rows(dialogs, target.max_positions, config.eval_fraction, config.eval_rows, config.supervise)
    torch.manual_seed(config.seed)
    device = accelerator.device
    head = make_head(config, target, rows, device).to(device)
    if tree is not None:
        check_policy(tree, head.max_depth)

    require_disk(config, head)
    weights_of = split_target(config, target, device)
    by_count, train, held_out, said = prepare_features(
        config, accelerator, target, head, rows, folder, shared, batches_per_step
    )
    total_steps = (saved or {}).get("total_steps")
    if accelerator.is_main_process and saved is None:
        facts = {"dtype": target.dtype_name, "processes": accelerator.num_processes}
        facts |= {"batches_per_step": batches_per_step}
        facts |= {"weights": target.fingerprint, **data_facts(config, rows, target)}
        folder.create(config, argv, manifest, sha256_of(Path(config.dialogs) / "dialogs.jsonl"), facts)
    if accelerator.is_main_process:
        folder.hold()
    accelerator.wait_for_everyone()
    autocast = target.dtype == torch.bfloat16 if config.autocast is None else config.autocast
    head.compiled = Compiled(config.family, device, rough=autocast) if config.compile else None
    joint = None if config.joint is None else Joint(config, target, head, autocast=autocast)
    weights = head if joint is None else joint
    optimizer: Any = make_optimizer(config, head, () if joint is None else list(joint.adapter.parameters()))
    model: nn.Module = joint or Step(head, autocast)
    state = read_state(config, accelerator, folder)
    progress = Progress() if state is None else state.progress
    if state is not None:
        weights.load_state_dict(state.weights, strict=True)
    if total_steps is None and accelerator.is_main_process:
        total_steps = by_count
        if config.max_seconds is not None and progress.step == 0:
            by_time = steps_by_time(config, train, lambda batch: trial(model, optimizer, batch))
            total_steps = min(by_time, by_count or by_time)
        folder.fix_total(int(total_steps or 1))
    gathered = Gathered(accelerator, head, weights, optimizer)
    tell_engine(accelerator, config, -(-batches_per_step // accelerator.num_processes))
    model, optimizer = accelerator.prepare(model, optimizer)
    gathered.adopt(optimizer, config.ema)
    if state is not None:
        gathered.load_optimizer(state.optimizer)
        gathered.load_average(state.average)
        set_rng(state.rng)
    [total_steps] = broadcast_object_list([total_steps])
    assert total_steps is not None
    if accelerator.is_main_process:
        folder.rewind_log(progress.step)
        if progress.step:
            folder.note_continued(argv, progress.step)
        if manifest.get("target", target.info.name) != target.info.name:
            say(f"the dialogs were written by {manifest['target']}, the head is trained for {target.info.name}")
        said += [] if joint is None else [joint.spell()]
        say_plan(head, rows, train, said, total_steps, progress)
        say_spread(batches_per_step, accelerator, config)
    begin_tracking(config, accelerator, continued=progress.step > 0)
    return Run(
        config, accelerator, folder, target, head, model, optimizer, gathered, train, held_out, rows, tree, manifest,
        total_steps, progress, batches_per_step, weights_of, joint,
    )  # fmt: skip


def make_accelerator(config: TrainConfig) -> Accelerator:
    """Return the accelerator, refusing what is not there or not supported."""
    if config.tracker != "none" and find_spec(config.tracker) is None:
        raise HeadwayError(
            f"tracker is {config.tracker!r}, which is not installed; run `pip install 'headway[{config.tracker}]'` or "
            "set tracker=none"
        )
    accelerator = launch(config)
    if config.shard_target and accelerator.num_processes == 1:
        raise HeadwayError("shard_target splits the target over several processes, and this is one; launch more")
    if config.compile:
        check_compile(accelerator)
    if is_split(accelerator) and config.lora is not None:
        raise HeadwayError("a lora is too small to be split over processes; launch with recipes/accelerate/ddp.yaml")
    if accelerator.distributed_type == DistributedType.DEEPSPEED and config.optimizer != "adamw":
        raise HeadwayError(
            f"optimizer is {config.optimizer!r}, and under DeepSpeed only adamw is split and saved; set optimizer=adamw, or "
            "launch with recipes/accelerate/ddp.yaml"
        )
    return accelerator


def tell_engine(accelerator: Accelerator, config: TrainConfig, turns: int) -> None:
    """Tell DeepSpeed what it does itself: clip, and count the batches between two steps."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return
    accelerator.gradient_accumulation_steps = turns
    accelerator.state.deepspeed_plugin.deepspeed_config |= {
        "train_micro_batch_size_per_gpu": 1,  # it only multiplies this
        "gradient_accumulation_steps": turns,
        "gradient_clipping": config.clip,
    }


def count_batches(saved: dict[str, Any] | None, config: TrainConfig, accelerator: Accelerator) -> int:
    """Return the batches of a step over all processes: as many as the run began with, on however many it goes on."""
    if saved is not None and "batches_per_step" in saved:
        return int(saved["batches_per_step"])
    return config.grad_accum * int((saved or {}).get("processes", accelerator.num_processes))


def load_target(config: TrainConfig, accelerator: Accelerator, saved: dict[str, Any] | None) -> Target:
    """Return the target on its device; one that will be split begins in host memory."""
    from headway.inference.target import Target

    dtype = same_dtype(config, accelerator, saved)
    where = "cpu" if config.shard_target else config.target_device or str(accelerator.device)
    require_memory(config, dtype, where)
    return Target.load(
        config.target, dtype=dtype, device=where, revision=config.revision,
        adapter=config.target_adapter, merge_adapter=config.merge_adapter,
    )  # fmt: skip


def split_target(config: TrainConfig, target: Target, device: torch.device) -> str | None:
    """Split the target over the processes if the recipe says so; return its fingerprint, which it then cannot give itself."""
    if not config.shard_target:
        return None
    weights_of = fingerprint(target.frozen)
    target.shard(device)
    return weights_of


def read_state(config: TrainConfig, accelerator: Accelerator, folder: RunFolder) -> Saved | None:
    """Return the newest state, or None. Raises HeadwayError unless all processes read the same."""
    state = folder.load(average=config.ema > 0)
    step = -1 if state is None else state.progress.step
    [first] = broadcast_object_list([step])
    steps: Tensor = accelerator.reduce(torch.tensor(float(step != first), device=accelerator.device))  # type: ignore[assignment]
    if float(steps):
        raise HeadwayError(
            f"the processes do not find the same states in {folder.path}; give an out=... that all machines share"
        )
    return state


def same_dtype(config: TrainConfig, accelerator: Accelerator, saved: dict[str, Any] | None) -> str:
    """Return the target's dtype: with `auto` what the run began with, else what the first process timed as fast."""
    if config.dtype != "auto":
        return config.dtype
    from headway.inference.target import fast_dtype

    dtype = (saved or {}).get("dtype")
    if dtype is None and accelerator.is_main_process:
        dtype = fast_dtype(str(accelerator.device), config.tokens_per_batch, training=True)
    [dtype] = broadcast_object_list([dtype])
    return str(dtype)


def check_weights(saved: dict[str, Any] | None, target: Target, folder: RunFolder) -> None:
    """Raise HeadwayError when a run is continued on a target of other weights under the same name."""
    before, now = (saved or {}).get("weights", target.fingerprint), target.fingerprint
    if before != now:
        raise HeadwayError(
            f"{folder.path} holds a run on {target.info.name} with weights {before}, now they are {now}; continue it on the "
            "target that it began with, or give another folder: out=..."
        )


def prepare_features(
    config: TrainConfig,
    accelerator: Accelerator,
    target: Target,
    head: Head,
    rows: Rows,
    folder: RunFolder,
    shared: Memory | None,
    batches_per_step: int,
) -> tuple[int | None, Features, Features, list[str]]:
    """Return the steps that epochs and max_steps allow, the features of both sets of rows, and lines that say where they are.

    Raises HeadwayError for features that were asked for and are not this target's, and for what does not fit.
    """
    if config.joint is not None:
        return joint_batches(config, target, head, rows, batches_per_step)
    recorded = Recorded(config.dialogs, target, config.features)
    if config.features is not None:
        recorded.require(head.config.taps)
    make_features = partial(
        Features, target, head.config.taps, recorded=recorded, store=config.store, device=accelerator.device
    )
    batches = make_batches(rows.train, config.tokens_per_batch)
    by_count = steps_by_count(config, batches_per_step, len(batches))
    repeats = by_count is None or by_count * batches_per_step > len(batches)
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    size = make_features(batches).num_bytes
    kept, why = choose_cache(config.cache, size, repeats, num_local, Path(config.out))
    train = make_features(batches, kept, folder.path / "cache", shared)
    held_out_kept: Kept = "off" if kept == "off" else "memory"
    held_out = make_features(make_batches(rows.held_out, config.tokens_per_batch), held_out_kept)
    if config.target_device is not None:
        train.look_ahead()
    return by_count, train, held_out, [why, recorded.spell(head.config.taps)]


def make_head(config: TrainConfig, target: Target, rows: Rows, device: torch.device) -> Head:
    """Return a head with its draft vocabulary chosen and its weights warm-started; `device` is where it will be."""
    frozen = target.frozen if config.target_device is None else target.frozen_on(device)
    config_class, head_class = find_family(config.family)
    if config.init_from is not None:
        head = begin_with(config, frozen)
    else:
        head = head_class(config_class.for_target(target.info, **config.head), frozen)
    head.objective = config.objective()
    if head.config.num_steps is not None:
        head.objective.check_steps(head.config.num_steps)
    if config.init_from is not None:
        return head
    size = getattr(head.config, "draft_vocab_size", 0)
    if size:
        counts = count_tokens(rows.train, target.info.vocab_size)
        head.set_draft_vocab(choose_draft_vocab(counts, size, target.info.num_tokens, always_keep=target.eos_ids))
    head.warm_start()
    return head.float()


def trial(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """Do a whole step at learning rate zero and forget it, to time it; before an engine has split anything."""
    model(batch)[0].backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.forget() if isinstance(optimizer, Both) else optimizer.state.clear()
    optimizer.zero_grad(set_to_none=True)


def say_plan(head: Head, rows: Rows, train: Features, said: list[str], total_steps: int, progress: Progress) -> None:
    """Say what the run is about to do, and what was left out."""
    size = sum(getattr(p, "ds_numel", p.numel()) for p in head.parameters() if p.requires_grad)  # ZeRO-3 leaves none
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
    for line in [*said, *([] if head.compiled is None else [SAID])]:
        say(line)
    say(f"{total_steps} steps" + (f", continuing after step {progress.step}" if progress.step else ""))


def say_spread(batches_per_step: int, accelerator: Accelerator, config: TrainConfig) -> None:
    """Say how the batches of a step are spread over several processes, or over others than the run began with."""
    processes = accelerator.num_processes
    if processes == 1 and batches_per_step == config.grad_accum:
        return
    idle = -batches_per_step % processes
    wait = f"; in the last of its turns {idle} of them have none" if idle else ""
    on = "1 process" if processes == 1 else f"{processes} processes ({accelerator.distributed_type.value})"
    say(f"{batches_per_step} batches a step on {on}{wait}")

"""Capture: the target reads the dialogs once, and what it thinks of them is kept in shards for training.

Letters: B rows, T positions, F width of all taps, D hidden.

Which dialogs a shard holds is a function of the dialogs alone, and so is which of them share a pass: a capture that was
killed goes on with the next shard, and ends with the bytes it would have had.
"""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headway.data.dialogs import Dialog, check_writer, read_dialogs, read_manifest
from headway.data.jsonl import lock
from headway.data.progress import Progress
from headway.data.recorded import FOLDER, Recorded, begin_folder, check_content, check_shard, dialog_tensors, usual_taps
from headway.data.shards import (
    STORES,
    Shard,
    ShardError,
    Store,
    decode,
    encode,
    feature_bytes,
    remove_torn,
    write_shard,
)
from headway.heads.common.errors import HeadwayError, Interrupted
from headway.heads.common.losses import summarise
from headway.heads.common.protocol import HeadConfig, Tap, TargetInfo
from headway.inference.target import Target

SHARD_TOKENS = 16384
"""Tokens of a shard, about: what a kill loses."""
PASS_TOKENS = 2048
"""Padded tokens of a pass of the target. Part of what makes a shard the same bytes again."""
TEACHER_BYTES = 12
"""Of each token: its id, and the target's log-normaliser and argmax after it."""


@dataclass(frozen=True)
class Plan:
    """What a capture is to write."""

    shards: list[list[Dialog]]
    """The dialogs of each shard, in the order of the dialogs folder."""
    num_recorded: int
    """Dialogs whose features were recorded while distilling."""
    num_cut: int
    """Dialogs longer than the target's context; features end there."""

    @property
    def num_tokens(self) -> int:
        """Tokens to capture: all of a dialog's but its last."""
        return sum(len(dialog.token_ids) - 1 for shard in self.shards for dialog in shard)


def capture(
    target: Target,
    dialogs: Path | str,
    taps: Sequence[Tap],
    *,
    out: Path | str | None = None,
    store: Store = "bfloat16",
    verify: bool = False,
    show: bool = True,
) -> Counter[str]:
    """Write the features of every dialog that has none into `out` (dialogs/features if None); return the folder's counts.

    Shards that are whole stay; one that is cut short, or no longer what the dialogs say, is made again, and so is, with
    `verify`, which reads them all, one whose checksums are wrong. `taps` should have `last`, which the teacher reads.

    Raises HeadwayError when the folder was made from another target, revision, chat template or tap set, when the disk is
    too small for what is missing, and for features that are not finite, naming the dialog; Interrupted after Ctrl-C.
    """
    if "last" not in taps:
        raise HeadwayError(f"taps are {list(taps)}; the teacher reads 'last': add it")
    folder = Path(dialogs) / FOLDER if out is None else Path(out)
    check_writer(read_manifest(dialogs), target.info, dialogs)
    begin_folder(folder, dialogs, target, taps, store)
    with (folder / ".lock").open("ab") as held:
        lock(held, folder)
        remove_torn(folder)
        try:
            return _fill(target, dialogs, folder, taps, store, verify, show)
        except KeyboardInterrupt:
            safe = len(list(folder.glob("capture-*.safetensors")))
            raise Interrupted.with_safe(safe, "shards", folder) from None


def _fill(
    target: Target, dialogs: Path | str, folder: Path, taps: Sequence[Tap], store: Store, verify: bool, show: bool
) -> Counter[str]:
    """Write the shards that the folder lacks and return its counts."""
    counts: Counter[str] = Counter(removed=remove_damaged(folder, target.info.hidden_size, verify, show))
    plan = make_plan(target, dialogs, folder)
    counts |= Counter(dialogs=sum(map(len, plan.shards)), recorded=plan.num_recorded, cut=plan.num_cut)
    for path in sorted(folder.glob("capture-*.safetensors"))[len(plan.shards) :]:
        path.unlink()  # of dialogs that were recorded since
    left: list[int] = []
    for n, part in enumerate(plan.shards):
        reason = _why_again(_path(folder, n), part, target, taps, store, verify)
        if reason is not None:
            left.append(n)
            counts["made again"] += bool(reason)
            if reason:
                print_line(f"{reason}; it is made again", show)
    counts["kept"] = len(plan.shards) - len(left)
    tokens = sum(len(d.token_ids) - 1 for n in left for d in plan.shards[n])
    require_disk(folder, captured_bytes(tokens, target.info.hidden_size, len(taps), store), store)
    progress = Progress("capture: shards", len(left), show=show)
    for n in left:
        tensors = _compute(target, plan.shards[n], taps, store)
        write_shard(_path(folder, n), tensors, {"dtype": target.dtype_name})
        counts["made"] += 1
        progress.add(items=1, tokens=sum(len(d.token_ids) - 1 for d in plan.shards[n]))
    progress.close(f"{folder}: {', '.join(f'{count} {what}' for what, count in counts.items() if count)}")
    return counts


def remove_damaged(folder: Path, hidden_size: int, verify: bool, show: bool) -> int:
    """Remove the shards of distilling that are not whole, and return how many: their dialogs are captured instead."""
    count = 0
    for path in sorted(folder.glob("shard-*.safetensors")):
        try:
            shard = Shard(path)
            if verify:
                check_content(shard, hidden_size)
        except ShardError as error:
            print_line(f"{path} is damaged ({error.reason}); it is removed, and its dialogs are captured", show)
            path.unlink()
            count += 1
    return count


def make_plan(target: Target, dialogs: Path | str, folder: Path) -> Plan:
    """Return which dialogs a capture into `folder` puts into which shard."""
    recorded = Recorded(dialogs, target, folder, files="shard-*.safetensors")
    shards: list[list[Dialog]] = []
    size = num_recorded = num_cut = 0
    for dialog in read_dialogs(dialogs):
        if len(dialog.token_ids) > target.max_positions:
            num_cut += 1
            dialog = Dialog(dialog.id, dialog.token_ids[: target.max_positions], dialog.spans, dialog.finish)
        if len(dialog.token_ids) < 2:
            continue
        if max(dialog.token_ids) >= target.info.vocab_size:
            raise HeadwayError(
                f"dialog {dialog.id!r} of {dialogs} has token {max(dialog.token_ids)}, {target.info.name} has "
                f"{target.info.vocab_size}; give the target that the dialogs are of"
            )
        if recorded.holds(dialog.id, dialog.token_ids):
            num_recorded += 1
            continue
        if not shards or size + len(dialog.token_ids) > SHARD_TOKENS:
            shards.append([])
            size = 0
        shards[-1].append(dialog)
        size += len(dialog.token_ids)
    return Plan(shards, num_recorded, num_cut)


def captured_bytes(num_tokens: int, hidden_size: int, num_taps: int, store: Store) -> int:
    """Return the bytes that captured features of so many tokens take, `last` being one of the taps."""
    return feature_bytes(num_tokens, hidden_size, num_taps, store) + TEACHER_BYTES * num_tokens


def check_request(info: TargetInfo, taps: str | None, store: str) -> tuple[tuple[Tap, ...], Store]:
    """Return the taps of `1,14,26,last` (those that every family reads if None) and the store.

    Raises HeadwayError for a layer that the target has not, and an unknown store.
    """
    if store not in STORES:
        raise HeadwayError(f"--store is {store!r}; allowed: {', '.join(STORES)}")
    chosen: tuple[Tap, ...] = usual_taps(info)
    if taps is not None:
        parts = [part.strip() for part in taps.split(",")]
        if not all(part == "last" or part.isdecimal() for part in parts):
            raise HeadwayError(f"--taps is {taps!r}; give layers from 0 and last: 1,14,26,last")
        chosen = tuple("last" if part == "last" else int(part) for part in parts)
    HeadConfig(taps=chosen).check_taps(info)
    return chosen, store


def spell_estimate(info: TargetInfo, dialogs: Path, taps: Sequence[Tap], store: Store, out: Path | None) -> str:
    """Return what a capture would write, in words, computed from the dialogs and the target's config alone."""
    folder = dialogs / FOLDER if out is None else out
    tokens = sum(len(dialog.token_ids) - 1 for dialog in read_dialogs(dialogs))
    both = ", ".join(f"{captured_bytes(tokens, info.hidden_size, len(taps), s) / 1e9:.4g} GB in {s}" for s in STORES)
    fits = captured_bytes(tokens, info.hidden_size, len(taps), store) <= free_disk(folder)
    return (
        f"capture: taps {list(taps)} of {tokens} tokens take {both} (computed); {folder} has {free_disk(folder) / 1e9:.4g} GB "
        f"free: {store} {'fits' if fits else 'does not fit'}"
    )


def require_disk(folder: Path, num_bytes: int, store: Store) -> None:
    """Raise HeadwayError unless that many bytes are free where `folder` is or will be."""
    free = free_disk(folder)
    if num_bytes > free:
        less = "" if store == "int8" else "--store int8 takes about half; "
        raise HeadwayError(
            f"the features take {num_bytes / 1e9:.4g} GB in {store}, {folder} has {free / 1e9:.4g} GB free; {less}"
            "--out on a larger disk, or train without capturing: the features are then computed as they are needed"
        )


def free_disk(folder: Path) -> int:
    """Return the free bytes where `folder` is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def print_line(text: str, show: bool) -> None:
    """Print a line on stderr."""
    if show:
        print(f"headway: {text}", file=sys.stderr, flush=True)


def _path(folder: Path, n: int) -> Path:
    return folder / f"capture-{n:05d}.safetensors"


def _why_again(
    path: Path, part: Sequence[Dialog], target: Target, taps: Sequence[Tap], store: Store, verify: bool
) -> str | None:
    """Return why a shard is to be made: nothing where there is none yet; None where it is whole and of these dialogs."""
    if not path.exists():
        return ""
    try:
        shard = Shard(path)
        check_shard(shard, store, len(taps), target.info.hidden_size)
        for dialog in part:
            if not _holds(shard, dialog):
                return f"{path} is of other dialogs"
        if len(shard.names) != 4 * len(part):
            return f"{path} is of other dialogs"
        if shard.facts.get("dtype") != target.dtype_name:
            return f"{path} was made in {shard.facts.get('dtype')}"
        if verify:
            check_content(shard, target.info.hidden_size)
    except ShardError as error:
        return f"{path} is damaged ({error.reason})"
    return None


def _holds(shard: Shard, dialog: Dialog) -> bool:
    name = f"ids {dialog.id}"
    return name in shard.names and shard.read(name).tolist() == dialog.token_ids[:-1]


@torch.no_grad()
def _compute(target: Target, part: Sequence[Dialog], taps: Sequence[Tap], store: Store) -> dict[str, Tensor]:
    """Return the tensors of one shard."""
    tensors: dict[str, Tensor] = {}
    for rows in passes(part):
        length_B = torch.tensor([len(dialog.token_ids) - 1 for dialog in rows])
        token_BT = torch.zeros(len(rows), int(length_B.max()), dtype=torch.long)
        for b, dialog in enumerate(rows):
            token_BT[b, : length_B[b]] = torch.tensor(dialog.token_ids[:-1])
        feature_BTF, last_BTD = target.features(token_BT.to(target.device), length_B.to(target.device), taps)
        for b, dialog in enumerate(rows):
            size = int(length_B[b])
            tensors |= dialog_tensors(dialog.id, dialog.token_ids, feature_BTF[b, :size], len(taps), store)
            # Of the feature as it will be read, so that the teacher's distribution sums to one.
            last_TD = decode(encode(last_BTD[b, :size], store), target.info.hidden_size).to(target.dtype)
            normaliser_T, argmax_T = summarise(target.frozen, last_TD)
            tensors[f"normaliser {dialog.id}"], tensors[f"argmax {dialog.id}"] = normaliser_T, argmax_T.int()
    return tensors


def passes(part: Sequence[Dialog]) -> list[list[Dialog]]:
    """Return the dialogs of a shard in passes of like length, none of more than PASS_TOKENS unless of one dialog."""
    rows: list[list[Dialog]] = []
    for dialog in sorted(part, key=lambda dialog: (len(dialog.token_ids), dialog.id)):
        if rows and (len(dialog.token_ids) - 1) * (len(rows[-1]) + 1) <= PASS_TOKENS:
            rows[-1].append(dialog)
        else:
            rows.append([dialog])
    return rows

"""Training batches with the target's features, computed when asked for and kept when that pays.

Letters: B rows, T positions, F tap width, D hidden, M label positions.

Features are rounded to bfloat16 whether they are kept or not, and batches have a fixed composition, so keeping them
changes no bit of the result.

What was recorded while distilling is read, not computed; a batch is read only when all its rows were recorded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headway.data.recorded import Recorded
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import label_positions, summarise
from headway.heads.common.protocol import Batch, Tap
from headway.train.batches import Row, pad

if TYPE_CHECKING:
    from headway.inference.target import Target

Kept = Literal["memory", "disk", "off"]

Memory = dict[tuple[Any, ...], dict[str, Tensor]]
"""Features by the rows of their batch. Runs in one process may share one: a head on `last` reads what another left."""

SHARE = 0.5
"""Share of the free memory that kept features may take."""


class Features:
    """The batches of one set of rows. `kept` says where features stay: memory, disk or off."""

    def __init__(
        self,
        target: Target,
        taps: Sequence[Tap],
        batches: Sequence[Sequence[Row]],
        kept: Kept = "off",
        folder: Path | None = None,
        shared: Memory | None = None,
        recorded: Recorded | None = None,
    ) -> None:
        self.target, self.taps, self.batches, self.kept = target, tuple(taps), batches, kept
        self.folder = folder
        self._recorded = recorded if recorded is not None and recorded.covers(self.taps) else None
        # The most common tap is the very feature the teacher reads: it is kept once.
        self._only_last = self.taps == ("last",)
        self._tap = f"tap {list(self.taps)}"
        self._memory: Memory = {} if shared is None else shared
        if kept == "disk":
            assert folder is not None
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def num_bytes(self) -> int:
        """Bytes that the features of all batches take."""
        positions = sum(len(rows) * max(len(row.token_ids) for row in rows) for rows in self.batches)
        width = self.target.info.hidden_size * (1 if self._only_last else len(self.taps) + 1)
        return positions * (width * 2 + 4 + 8)

    def __getitem__(self, n: int) -> Batch:
        """Return batch n on the target's device."""
        kept = self._find(n)
        return self.compute(n) if kept is None else self._fill(self._tokens(n), kept)

    def compute(self, n: int) -> Batch:
        """Return batch n with its features computed anew, and keep them if asked to."""
        batch = self._tokens(n)
        features = self._compute(batch, self.batches[n])
        self._keep(n, features)
        return self._fill(batch, features)

    def _tokens(self, n: int) -> Batch:
        return Batch(*pad(self.batches[n], self.target.device), torch.empty(0), torch.empty(0))

    def _fill(self, batch: Batch, kept: dict[str, Tensor]) -> Batch:
        last = kept["last"].to(self.target.device, self.target.dtype)
        batch.last_BTD = last
        batch.tap_BTF = last if self._only_last else kept[self._tap].to(self.target.device, self.target.dtype)
        batch.normaliser_BT = kept["normaliser"].to(self.target.device)
        batch.argmax_BT = kept["argmax"].to(self.target.device)
        return batch

    @torch.no_grad()
    def _compute(self, batch: Batch, rows: Sequence[Row]) -> dict[str, Tensor]:
        found = self._read(batch, rows)
        if found is None:
            found = self.target.features(batch.token_BT, batch.length_B, self.taps)
        tap_BTF, last_BTD = found
        features = {"last": last_BTD.to(torch.bfloat16)}
        if not self._only_last:
            features[self._tap] = tap_BTF.to(torch.bfloat16)
        row_M, position_M = label_positions(batch)
        last_MD = features["last"][row_M, position_M].to(self.target.dtype)
        normaliser_M, argmax_M = summarise(self.target.frozen, last_MD)
        normaliser_BT = torch.zeros(batch.token_BT.shape, dtype=torch.float32, device=last_MD.device)
        argmax_BT = torch.zeros_like(batch.token_BT)
        normaliser_BT[row_M, position_M] = normaliser_M
        argmax_BT[row_M, position_M] = argmax_M
        return {**features, "normaliser": normaliser_BT, "argmax": argmax_BT}

    def _read(self, batch: Batch, rows: Sequence[Row]) -> tuple[Tensor, Tensor] | None:
        """Return the recorded features of a batch, zero where a row has none, or None unless all rows were recorded."""
        if self._recorded is None:
            return None
        taps = ("last",) if self._only_last else (*self.taps, "last")
        rows_TF = [self._recorded.find(row.id, row.token_ids, taps) for row in rows]
        width = self.target.info.hidden_size
        feature_BTF = torch.zeros(*batch.token_BT.shape, len(taps) * width, dtype=torch.bfloat16)
        for b, (row, row_TF) in enumerate(zip(rows, rows_TF, strict=True)):
            if row_TF is None or len(row_TF) < len(row.token_ids) - 1:
                return None
            size = min(len(row_TF), len(row.token_ids))
            feature_BTF[b, :size] = row_TF[:size]
        feature_BTF = feature_BTF.to(batch.token_BT.device)
        last_BTD = feature_BTF[..., -width:]
        return (last_BTD if self._only_last else feature_BTF[..., :-width]), last_BTD

    def _find(self, n: int) -> dict[str, Tensor] | None:
        if self.kept == "disk" and self._path(n).is_file():
            return load_file(self._path(n))
        found = self._memory.get(self._key(n))
        return found if found is not None and (self._only_last or self._tap in found) else None

    def _key(self, n: int) -> tuple[Any, ...]:
        # The goals too: the teacher's normalisers are made for them alone.
        return tuple((row.id, len(row.token_ids), row.num_goals) for row in self.batches[n])

    @property
    def num_missing(self) -> int:
        """Batches whose features are yet to be computed."""
        return sum(self._find(n) is None for n in range(len(self.batches)))

    def _keep(self, n: int, features: dict[str, Tensor]) -> None:
        if self.kept == "memory":
            self._memory[self._key(n)] = {name: tensor.cpu() for name, tensor in features.items()}
        if self.kept == "disk":
            aside = self._path(n).with_suffix(f".{os.getpid()}.tmp")
            save_file({name: tensor.cpu().contiguous() for name, tensor in features.items()}, aside)
            aside.replace(self._path(n))

    def _path(self, n: int) -> Path:
        assert self.folder is not None
        return self.folder / f"batch-{n}.safetensors"


def choose_cache(
    wanted: str, num_bytes: int, repeats: bool, num_local: int = 1, folder: Path | None = None
) -> tuple[Kept, str]:
    """Return where to keep features (memory, disk or off) and the line that says why.

    `num_local` processes on this machine each keep their own in memory, in the end of all rows, as batches go to another
    of them in another epoch; on the disk of `folder` they share them. Raises HeadwayError for a disk that is asked for
    and too small.
    """
    free, free_disk = _free_memory(), _free_disk(folder) if folder is not None else 0
    each = "" if num_local == 1 else f" in each of {num_local} processes"
    size = f"features of all rows take {num_bytes / 2**30:.2f} GiB{each}, {free / 2**30:.1f} GiB of memory are free"
    disk = f"{size}, {free_disk / 2**30:.1f} GiB of disk"
    if wanted == "disk" and folder is not None and num_bytes > free_disk:
        raise HeadwayError(f"{disk}: cache=disk does not fit; use cache=off, or an out=... on a larger disk")
    if wanted != "auto":
        return cast(Kept, wanted), f"{size}; cache: {wanted}, as asked"
    if not repeats:
        return "off", f"{size}; cache: off, no batch comes twice"
    if num_bytes * num_local <= SHARE * free:
        return "memory", f"{size}; cache: memory"
    if num_bytes <= SHARE * free_disk:
        return "disk", f"{disk}; cache: disk, as they would take more than {SHARE:.0%} of the memory"
    return "off", f"{disk}; cache: off, more than {SHARE:.0%} of either"


def _free_disk(folder: Path) -> int:
    """Return the free bytes where `folder` is or will be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _free_memory() -> int:
    import psutil

    free = psutil.virtual_memory().available
    # In a container the limit may be the group's.
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free

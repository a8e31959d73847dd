"""Training batches with the target's features, computed when asked for and kept when that pays.

Letters: B rows, T positions, F tap width, D hidden, M label positions.

Features are rounded as they would be stored (shards.py), whether they are kept or not, and batches have a fixed
composition, so keeping them changes no bit of the result.

What was recorded while distilling, or captured, is read, not computed; a batch is read only when all its rows are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from headway.data.capture import free_disk
from headway.data.manifest import digest, read_json, write_json
from headway.data.recorded import Recorded
from headway.data.shards import Shard, ShardError, Store, decode, encode, remove_torn, row_bytes, write_shard
from headway.heads.common.errors import HeadwayError
from headway.heads.common.losses import label_positions, summarise
from headway.heads.common.protocol import Batch, Tap
from headway.train.batches import Row, pad
from headway.train.progress import say

if TYPE_CHECKING:
    from headway.inference.target import Target

Kept = Literal["memory", "disk", "off"]

Memory = dict[tuple[Any, ...], dict[str, Tensor]]
"""Features by the rows of their batch. Runs in one process may share one: a head on `last` reads what another left."""

SHARE = 0.5
"""Share of the free memory that kept features may take."""
FIGURE_BYTES = 12
"""Of each position: the teacher's log-normaliser and argmax."""


class Features:
    """The batches of one set of rows. `kept` says where features stay: memory, disk or off; `store` how they are rounded.

    Batches are on `device`, that of the head, which is the target's unless it is given. A folder that keeps
    features of something else is refused when it is first looked into: HeadwayError, naming the difference.
    """

    def __init__(
        self,
        target: Target,
        taps: Sequence[Tap],
        batches: Sequence[Sequence[Row]],
        kept: Kept = "off",
        folder: Path | None = None,
        shared: Memory | None = None,
        recorded: Recorded | None = None,
        store: Store = "bfloat16",
        device: torch.device | None = None,
    ) -> None:
        self.target, self.taps, self.batches, self.kept = target, tuple(taps), batches, kept
        self.folder, self.store = folder, store
        self.device = target.device if device is None else device
        self._recorded = recorded if recorded is not None and recorded.covers(self.taps) else None
        # The most common tap is the very feature the teacher reads: it is kept once.
        self._only_last = self.taps == ("last",)
        self._tap = f"tap {list(self.taps)}"
        self._memory: Memory = {} if shared is None else shared
        self._worker: ThreadPoolExecutor | None = None
        self._ahead: tuple[int, Future[Batch]] | None = None
        self._begun = False

    @property
    def num_bytes(self) -> int:
        """Bytes that the features of all batches take."""
        positions = sum(len(rows) * max(len(row.token_ids) for row in rows) for rows in self.batches)
        taps = 1 if self._only_last else len(self.taps) + 1
        return positions * (taps * row_bytes(self.target.info.hidden_size, self.store) + FIGURE_BYTES)

    def __getitem__(self, n: int) -> Batch:
        """Return batch n."""
        kept = self._find(n)
        return self.compute(n) if kept is None else self._fill(self._tokens(n), kept)

    def compute(self, n: int) -> Batch:
        """Return batch n with its features computed anew, and keep them if asked to."""
        batch = self._tokens(n)
        features = self._compute(batch, self.batches[n])
        self._keep(n, features)
        return self._fill(batch, features)

    def look_ahead(self) -> None:
        """From now on compute the batch after the one that `take` returns meanwhile: the target has a device of its own."""
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="features")

    def take(self, n: int, then: int) -> Batch:
        """Return batch n; `then` is the one that will be taken next."""
        if self._worker is None:
            return self[n]
        before = self._ahead
        self.settle()  # two passes at once would take one another's features
        batch = before[1].result() if before is not None and before[0] == n else self[n]
        self._ahead = (then, self._worker.submit(self.__getitem__, then))
        return batch

    def settle(self) -> None:
        """Wait until the target is free: for others to use it."""
        if self._ahead is not None:
            self._ahead[1].exception()

    def close(self) -> None:
        """Compute no more ahead; safe to call twice."""
        if self._worker is not None:
            self._worker.shutdown(cancel_futures=True)
            self._worker = self._ahead = None

    def needs_target(self, n: int) -> bool:
        """Return whether batch n is neither kept nor recorded, so that the target has to run."""
        return self._find(n) is None and self._read(self._tokens(n), self.batches[n]) is None

    def pass_along(self, n: int) -> None:
        """Run a split target on batch n for the sake of other processes."""
        batch = self._tokens(n)
        self.target.features(batch.token_BT, batch.length_B, self.taps)

    def supervised(self, n: int) -> Tensor:
        """Return which tokens of batch n are goals, bool [B, T]."""
        return pad(self.batches[n], self.device)[2]

    def _tokens(self, n: int) -> Batch:
        return Batch(*pad(self.batches[n], self.target.device), torch.empty(0), torch.empty(0))

    def _fill(self, batch: Batch, kept: dict[str, Tensor]) -> Batch:
        device, dtype, D = self.device, self.target.dtype, self.target.info.hidden_size
        last = decode(kept["last"].to(device), D).to(dtype)
        tap = last if self._only_last else decode(kept[self._tap].to(device), D).to(dtype).flatten(2)
        return Batch(
            batch.token_BT.to(device),
            batch.length_B.to(device),
            batch.supervised_BT.to(device),
            tap,
            last,
            kept["normaliser"].to(device),
            kept["argmax"].to(device),
        )

    @torch.no_grad()
    def _compute(self, batch: Batch, rows: Sequence[Row]) -> dict[str, Tensor]:
        D = self.target.info.hidden_size
        read = self._read(batch, rows)
        tap_BTF, last_BTD = self.target.features(batch.token_BT, batch.length_B, self.taps) if read is None else read
        features = {"last": encode(last_BTD, self.store)}
        if not self._only_last:
            features[self._tap] = encode(tap_BTF.unflatten(-1, (-1, D)), self.store)
        figures = None if read is None else self._read_figures(batch, rows)
        if figures is None:
            row_M, position_M = label_positions(batch)
            last_MD = decode(features["last"][row_M, position_M], D).to(self.target.dtype)
            normaliser_M, argmax_M = summarise(self.target.frozen, last_MD)
            figures = (
                torch.zeros(batch.token_BT.shape, dtype=torch.float32, device=last_MD.device),
                torch.zeros_like(batch.token_BT),
            )
            figures[0][row_M, position_M], figures[1][row_M, position_M] = normaliser_M, argmax_M
        return {**features, "normaliser": figures[0], "argmax": figures[1]}

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

    def _read_figures(self, batch: Batch, rows: Sequence[Row]) -> tuple[Tensor, Tensor] | None:
        """Return the teacher's figures that were captured with the features, or None unless all rows have them."""
        assert self._recorded is not None
        if self._recorded.store != self.store:
            return None  # they are of features as they were stored
        normaliser_BT = torch.zeros(batch.token_BT.shape)
        argmax_BT = torch.zeros(batch.token_BT.shape, dtype=torch.long)
        for b, row in enumerate(rows):
            found = self._recorded.find_teacher(row.id)
            if found is None:
                return None
            size = min(len(found[0]), len(row.token_ids))
            normaliser_BT[b, :size], argmax_BT[b, :size] = found[0][:size], found[1][:size]
        device = batch.token_BT.device
        return normaliser_BT.to(device), argmax_BT.to(device)

    def _find(self, n: int) -> dict[str, Tensor] | None:
        if self.kept == "disk" and self._path(n).is_file():
            try:
                return Shard(self._path(n)).read_all()
            except ShardError as error:
                say(f"{error.path} is damaged ({error.reason}); it is made again")
                error.path.unlink(missing_ok=True)
        found = self._memory.get(self._key(n))
        return found if found is not None and (self._only_last or self._tap in found) else None

    def _key(self, n: int) -> tuple[Any, ...]:
        # The goals too: the teacher's normalisers are made for them alone.
        return (self.store, *((row.id, len(row.token_ids), row.num_goals) for row in self.batches[n]))

    @property
    def num_missing(self) -> int:
        """Batches whose features are yet to be computed."""
        if self.kept == "disk":
            return sum(not self._path(n).is_file() for n in range(len(self.batches)))
        return sum(self._find(n) is None for n in range(len(self.batches)))

    def _keep(self, n: int, features: dict[str, Tensor]) -> None:
        if self.kept == "memory":
            self._memory[self._key(n)] = {name: tensor.cpu() for name, tensor in features.items()}
        if self.kept == "disk":
            write_shard(self._path(n), features)

    def _path(self, n: int) -> Path:
        assert self.folder is not None
        if not self._begun:
            self._begin_folder()
            self._begun = True
        return self.folder / f"batch-{n}.safetensors"

    def _begin_folder(self) -> None:
        """Make the folder of a disk cache, or continue it if it keeps the same batches' features of the same target."""
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_torn(self.folder)
        manifest = {
            "target": self.target.info.name,
            "revision": self.target.info.revision,
            "adapter": self.target.info.adapter and self.target.info.adapter.sha256,
            "weights": self.target.fingerprint,
            "dtype": self.target.dtype_name,
            "taps": list(self.taps),
            "store": self.store,
            "batches": digest([[row.id, row.token_ids, row.supervised] for rows in self.batches for row in rows]),
        }
        path = self.folder / "manifest.json"
        known = read_json(path) if path.is_file() else {}
        if not known:
            for batch in self.folder.glob("batch-*.safetensors"):
                batch.unlink()  # of nobody knows what
            write_json(path, manifest)
        for key, value in manifest.items():
            if known and known.get(key) != value:
                raise HeadwayError(
                    f"{self.folder} keeps features made with {key} {known.get(key)!r}, now it is {value!r}; continue with the "
                    "same, or delete the folder"
                )


def choose_cache(
    wanted: str, num_bytes: int, repeats: bool, num_local: int = 1, folder: Path | None = None
) -> tuple[Kept, str]:
    """Return where to keep features (memory, disk or off) and the line that says why.

    `num_local` processes on this machine each keep their own in memory, in the end of all rows, as batches go to another
    of them in another epoch; on the disk of `folder` they share them. Raises HeadwayError for a disk that is asked for
    and too small.
    """
    free, disk_free = free_memory(), free_disk(folder) if folder is not None else 0
    each = "" if num_local == 1 else f" in each of {num_local} processes"
    size = f"features of all rows take {num_bytes / 2**30:.2f} GiB{each}, {free / 2**30:.1f} GiB of memory are free"
    disk = f"{size}, {disk_free / 2**30:.1f} GiB of disk"
    if wanted == "disk" and folder is not None and num_bytes > disk_free:
        raise HeadwayError(
            f"{disk}: cache=disk does not fit; use cache=off, store=int8 for about half, or an out=... on a larger disk"
        )
    if wanted == "memory" and num_bytes * num_local > free:
        raise HeadwayError(f"{size}: cache=memory does not fit; use cache=off or disk, or store=int8 for about half")
    if wanted != "auto":
        return cast(Kept, wanted), f"{size}; cache: {wanted}, as asked"
    if not repeats:
        return "off", f"{size}; cache: off, no batch comes twice"
    if num_bytes * num_local <= SHARE * free:
        return "memory", f"{size}; cache: memory"
    if num_bytes <= SHARE * disk_free:
        return "disk", f"{disk}; cache: disk, as they would take more than {SHARE:.0%} of the memory"
    return "off", f"{disk}; cache: off, more than {SHARE:.0%} of either"


def free_memory() -> int:
    """Return the bytes of memory that this process may still take."""
    import psutil

    free = psutil.virtual_memory().available
    # In a container the limit may be the group's.
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return free

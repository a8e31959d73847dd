"""Features of the target, recorded while it answers: shards beside the dialogs, so that training need not compute them.

Letters: T positions, F width of all taps, D hidden.

    dialogs/features/manifest.json            taps, target, the fingerprint of its weights, the dtypes it ran in
    dialogs/features/shard-00000.safetensors  for each dialog its features, [T - 1, F] in bfloat16, and the [T - 1] token
                                              ids they are of: other words under the same id are not taken for them

A dialog's last token is emitted and never read, so its position has no feature; training needs none there. A dialog
without features, because the process died before its shard was whole, is computed like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.data.manifest import read_json, require_same, write_json
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Tap, TargetInfo, families, find_family

if TYPE_CHECKING:
    from headway.inference.target import Target

FOLDER = "features"
FORMAT = 2
SHARD_BYTES = 64 << 20


def usual_taps(info: TargetInfo) -> tuple[Tap, ...]:
    """Return the taps that heads of every family read unless told otherwise, and `last`, which their teacher reads."""
    layers = set()
    for name in families():
        layers |= {tap for tap in find_family(name)[0].for_target(info).taps if isinstance(tap, int)}
    return (*sorted(layers), "last")


class FeatureWriter:
    """Adds shards of features to a dialogs folder. Use as a context manager.

    Raises HeadwayError on opening when the folder holds features of other taps or other weights, naming the difference.
    """

    def __init__(self, dialogs: Path | str, target: Target, taps: Sequence[Tap]) -> None:
        self.folder = Path(dialogs) / FOLDER
        self._waiting: dict[str, Tensor] = {}
        self._num_bytes = 0
        manifest = _manifest(target, taps)
        dtypes = {str(target.dtype).removeprefix("torch.")}
        if (self.folder / "manifest.json").is_file():
            known = read_json(self.folder / "manifest.json")
            require_same(known, manifest, self.folder)
            dtypes |= set(known.get("dtypes") or ())
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "manifest.json", {**manifest, "dtypes": sorted(dtypes)})

    def add(self, dialog_id: str, token_ids: Sequence[int], feature_TF: Tensor) -> None:
        """Take the features of one dialog; they are on the disk once enough for a shard are there."""
        self._waiting[_key(dialog_id)] = feature_TF.contiguous()
        self._waiting[_ids_key(dialog_id)] = torch.tensor(token_ids[: len(feature_TF)], dtype=torch.int32)
        self._num_bytes += feature_TF.nbytes
        if self._num_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard."""
        if not self._waiting:
            return
        last = max((int(path.stem.removeprefix("shard-")) for path in _shards(self.folder)), default=-1)
        path = self.folder / f"shard-{last + 1:05d}.safetensors"
        aside = path.with_suffix(".tmp")
        save_file(self._waiting, aside)
        aside.replace(path)
        self._waiting, self._num_bytes = {}, 0

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()


class Recorded:
    """The features that a dialogs folder holds. `reason` says why they cannot be used, and is empty where they can."""

    def __init__(self, dialogs: Path | str, target: Target) -> None:
        folder = Path(dialogs) / FOLDER
        self._shards: dict[str, Any] = {}
        self._width = target.info.hidden_size
        self.taps: tuple[Tap, ...] = ()
        self.dtypes: list[str] = []
        self.reason = ""
        if not (folder / "manifest.json").is_file():
            self.reason = "none were recorded"
            return
        known = read_json(folder / "manifest.json")
        self.taps, self.dtypes = tuple(known.get("taps") or ()), list(known.get("dtypes") or ())
        for key, value in _manifest(target, self.taps).items():
            if known.get(key) != value:
                self.reason = f"those in {folder} were recorded with {key} {known.get(key)!r}, now it is {value!r}"
                return
        for path in _shards(folder):
            try:
                shard = safe_open(path, framework="pt")
                self._shards |= dict.fromkeys(shard.keys(), shard)
            except (SafetensorError, OSError) as error:
                raise HeadwayError(
                    f"{path} cannot be read ({error}); delete it, its features are then computed"
                ) from error
        if not self._shards:
            self.reason = "none were recorded"

    def __len__(self) -> int:
        return sum(key.startswith("dialog ") for key in self._shards)

    def covers(self, taps: Sequence[Tap]) -> bool:
        """Return whether every one of the taps, and `last`, was recorded."""
        return not self.reason and {*taps, "last"} <= set(self.taps)

    def spell(self, taps: Sequence[Tap]) -> str:
        """Return a line that says what becomes of the recorded features in training on these taps."""
        if self.reason:
            return f"recorded features: {self.reason}; the target computes them"
        if not self.covers(taps):
            return f"recorded features: of taps {list(self.taps)}, not of all of {list(taps)}; the target computes them"
        made = " and ".join(self.dtypes)
        return f"recorded features: of {len(self)} dialogs, made in {made}, read instead of computed"

    def find(self, dialog_id: str, token_ids: Sequence[int], taps: Sequence[Tap]) -> Tensor | None:
        """Return the taps' features of a dialog, bfloat16 [T - 1, len(taps) * D], or None when it has none.

        `token_ids` are the dialog's, from its start on; features of other tokens are not its.
        """
        shard = self._shards.get(_key(dialog_id))
        if shard is None:
            return None
        known = shard.get_tensor(_ids_key(dialog_id)).tolist()
        size = min(len(known), len(token_ids))
        if known[:size] != list(token_ids[:size]):
            return None
        feature_TF = shard.get_tensor(_key(dialog_id))
        if tuple(taps) == self.taps:
            return feature_TF
        starts = [self.taps.index(tap) * self._width for tap in taps]
        return torch.cat([feature_TF[:, at : at + self._width] for at in starts], 1)


def _manifest(target: Target, taps: Sequence[Tap]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "target": target.info.name,
        "weights": target.fingerprint,
        "hidden_size": target.info.hidden_size,
        "taps": list(taps),
    }


def _shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.safetensors"))


def _key(dialog_id: str) -> str:
    # A prefix, because safetensors keeps a name of its own.
    return f"dialog {dialog_id}"


def _ids_key(dialog_id: str) -> str:
    return f"ids {dialog_id}"

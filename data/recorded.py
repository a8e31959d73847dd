"""Features of the target, kept beside the dialogs in shards, so that training need not compute them.

Letters: T positions, F width of all taps, D hidden, W bytes of a stored row.

    dialogs/features/manifest.json             what they are of: target, revision, fingerprint of its weights, chat template,
                                               taps, how they are stored; and the dtypes that the target ran in
    dialogs/features/shard-00000.safetensors   written while distilling
    dialogs/features/capture-00000.safetensors written by `headway capture`

Of each dialog a shard holds its features (bfloat16 [T - 1, F], or uint8 [T - 1, taps, W], see shards.py) and the [T - 1]
token ids they are of: other words under the same id are not taken for them. Captured ones come with the teacher's
figures, the target's log-normaliser and argmax at each position, so that no [T, vocabulary] is ever kept or computed twice.

A dialog's last token is emitted and never read, so its position has no feature; training needs none there. A dialog
without features, because the process died before its shard was whole, is computed like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.data.manifest import read_json, require_same, write_json
from headway.data.shards import (
    Shard,
    ShardError,
    Store,
    decode,
    encode,
    require_finite,
    row_bytes,
    total_bytes,
    write_shard,
)
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Tap, TargetInfo, families, find_family

if TYPE_CHECKING:
    from headway.inference.target import Target

FOLDER = "features"
FORMAT = 3
SHARD_BYTES = 64 << 20
REMEDY = "`headway capture` makes it again; or delete it, its features are then computed"


def usual_taps(info: TargetInfo) -> tuple[Tap, ...]:
    """Return the taps that heads of every family read unless told otherwise, and `last`, which their teacher reads."""
    layers = set()
    for name in families():
        layers |= {tap for tap in find_family(name)[0].for_target(info).taps if isinstance(tap, int)}
    return (*sorted(layers), "last")


def begin_folder(
    folder: Path, dialogs: Path | str, target: Target, taps: Sequence[Tap], store: Store
) -> dict[str, Any]:
    """Make the features folder, or continue it, and return its manifest.

    Raises HeadwayError when it holds features of another target, revision, chat template or tap set, or stored otherwise,
    naming the difference.
    """
    manifest = {**_identity(dialogs, target, taps), "store": store}
    dtypes = {target.dtype_name}
    if (folder / "manifest.json").is_file():
        known = read_json(folder / "manifest.json")
        require_same(known, manifest, folder)
        dtypes |= set(known.get("dtypes") or ())
    folder.mkdir(parents=True, exist_ok=True)
    manifest["dtypes"] = sorted(dtypes)
    write_json(folder / "manifest.json", manifest)
    return manifest


def dialog_tensors(
    dialog_id: str, token_ids: Sequence[int], feature_TF: Tensor, num_taps: int, store: Store
) -> dict[str, Tensor]:
    """Return what a shard holds of a dialog whose features are `feature_TF`. Raises HeadwayError unless they are finite."""
    require_finite(feature_TF, f"dialog {dialog_id!r}")
    if store == "bfloat16":
        stored = encode(feature_TF, store)
    else:
        stored = encode(feature_TF.unflatten(-1, (num_taps, -1)), store)
    return {_key(dialog_id): stored, _ids_key(dialog_id): torch.tensor(token_ids[: len(feature_TF)], dtype=torch.int32)}


class FeatureWriter:
    """Adds shards of features to a dialogs folder. Use as a context manager.

    Raises HeadwayError on opening when the folder holds features of other taps or other weights, naming the difference.
    """

    def __init__(self, dialogs: Path | str, target: Target, taps: Sequence[Tap], store: Store = "bfloat16") -> None:
        self.folder = Path(dialogs) / FOLDER
        self._taps, self._store = tuple(taps), store
        self._waiting: dict[str, Tensor] = {}
        self._num_bytes = 0
        begin_folder(self.folder, dialogs, target, taps, store)

    def add(self, dialog_id: str, token_ids: Sequence[int], feature_TF: Tensor) -> None:
        """Take the features of one dialog; they are on the disk once enough for a shard are there."""
        tensors = dialog_tensors(dialog_id, token_ids, feature_TF, len(self._taps), self._store)
        self._waiting |= tensors
        self._num_bytes += total_bytes(tensors.values())
        if self._num_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what waits as a shard."""
        if not self._waiting:
            return
        last = max(
            (int(path.stem.removeprefix("shard-")) for path in self.folder.glob("shard-*.safetensors")), default=-1
        )
        write_shard(self.folder / f"shard-{last + 1:05d}.safetensors", self._waiting)
        self._waiting, self._num_bytes = {}, 0

    def __enter__(self) -> FeatureWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.flush()


class Recorded:
    """The features that a dialogs folder holds, or those in `folder`.

    `reason` says why they cannot be used, and is empty where they can. `files` takes some of the shards. Raises
    HeadwayError for a shard that is damaged, naming it.
    """

    def __init__(
        self, dialogs: Path | str, target: Target, folder: Path | str | None = None, *, files: str = "*.safetensors"
    ) -> None:
        self.folder = Path(dialogs) / FOLDER if folder is None else Path(folder)
        self._shards: dict[str, Shard] = {}
        self._width = target.info.hidden_size
        self._dtype = target.dtype_name
        self.taps: tuple[Tap, ...] = ()
        self.store: Store = "bfloat16"
        self.dtypes: list[str] = []
        self.reason = self._why_not(dialogs, target)
        if not self.reason:
            for path in sorted(self.folder.glob(files)):
                shard = Shard(path, REMEDY)
                check_shard(shard, self.store, len(self.taps), self._width)
                self._shards |= dict.fromkeys(shard.names, shard)
            self.reason = "" if self._shards else "none were recorded"

    def require(self, taps: Sequence[Tap]) -> None:
        """Raise HeadwayError unless the folder holds this target's features of these taps."""
        if not self.covers(taps):
            reason = self.reason or f"they are of taps {list(self.taps)}, not of all of {list(taps)}"
            raise HeadwayError(
                f"features in {self.folder}: {reason}; make them with `headway capture`, or leave out features=..."
            )

    def _why_not(self, dialogs: Path | str, target: Target) -> str:
        """Return why the folder's features are not this target's, or nothing."""
        if not (self.folder / "manifest.json").is_file():
            return "none were recorded"
        known = read_json(self.folder / "manifest.json")
        self.taps, self.dtypes = tuple(known.get("taps") or ()), list(known.get("dtypes") or ())
        for key, value in _identity(dialogs, target, self.taps).items():
            if known.get(key) != value:
                return f"those in {self.folder} were recorded with {key} {known.get(key)!r}, now it is {value!r}"
        self.store = known["store"]
        return ""

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
        return (
            f"recorded features: of {len(self)} dialogs, made in {made}, kept in {self.store}, read instead of computed"
        )

    def holds(self, dialog_id: str, token_ids: Sequence[int]) -> bool:
        """Return whether the features of a dialog are there, of all its tokens but the last at least."""
        shard = self._shards.get(_key(dialog_id))
        return (
            shard is not None
            and shard.shape(_ids_key(dialog_id))[0] >= len(token_ids) - 1
            and self._are_of(shard, dialog_id, token_ids)
        )

    def find(self, dialog_id: str, token_ids: Sequence[int], taps: Sequence[Tap]) -> Tensor | None:
        """Return the taps' features of a dialog, bfloat16 [T - 1, len(taps) * D], or None when it has none.

        `token_ids` are the dialog's, from its start on; features of other tokens are not its. Raises HeadwayError for
        features that are damaged, naming their shard.
        """
        shard = self._shards.get(_key(dialog_id))
        if shard is None or not self._are_of(shard, dialog_id, token_ids):
            return None
        stored = shard.read(_key(dialog_id))
        places = [self.taps.index(tap) for tap in taps]
        if stored.dtype != torch.uint8:
            stored = stored.unflatten(-1, (len(self.taps), self._width))
        if tuple(taps) != self.taps:
            stored = stored[:, places]
        return _finite(decode(stored, self._width), shard, dialog_id).flatten(1)

    def find_teacher(self, dialog_id: str) -> tuple[Tensor, Tensor] | None:
        """Return the target's log-normaliser, float32 [T - 1], and argmax, int64 [T - 1], of a dialog that `find` found.

        None where they were not captured, or by a target of another dtype, whose logits differ.
        """
        shard = self._shards.get(_key(dialog_id))
        if shard is None or shard.facts.get("dtype") != self._dtype:
            return None
        return shard.read(f"normaliser {dialog_id}"), shard.read(f"argmax {dialog_id}").long()

    def _are_of(self, shard: Shard, dialog_id: str, token_ids: Sequence[int]) -> bool:
        known = shard.read(_ids_key(dialog_id)).tolist()
        size = min(len(known), len(token_ids))
        return known[:size] == list(token_ids[:size])


def check_shard(shard: Shard, store: Store, num_taps: int, hidden_size: int) -> None:
    """Raise ShardError unless each dialog of a shard has as many features as token ids, of the right width."""
    width = [num_taps * hidden_size] if store == "bfloat16" else [num_taps, row_bytes(hidden_size, store)]
    for name in shard.names:
        kind, _, dialog_id = name.partition(" ")
        if kind not in ("dialog", "ids"):
            continue
        other = _ids_key(dialog_id) if kind == "dialog" else _key(dialog_id)
        if other not in shard.names:
            raise ShardError(shard.path, f"it has {name!r} without {other!r}", REMEDY)
        if kind == "dialog":
            size, *got = shard.shape(name)
            ids = shard.shape(other)[0]
            if size != ids or got != width:
                raise ShardError(
                    shard.path,
                    f"dialog {dialog_id!r} has {size} features of shape {got} for {ids} ids, not {ids} of {width}",
                    REMEDY,
                )


def check_content(shard: Shard, hidden_size: int) -> None:
    """Read a shard whole. Raises ShardError unless it is what was written, and every feature a finite number."""
    for name in shard.names:
        tensor = shard.read(name)
        if name.startswith("dialog "):
            _finite(decode(tensor, hidden_size), shard, name.removeprefix("dialog "))


def _finite(feature: Tensor, shard: Shard, dialog_id: str) -> Tensor:
    if not bool(feature.isfinite().all()):
        raise ShardError(shard.path, f"features of dialog {dialog_id!r} that are not finite", REMEDY)
    return feature


def _identity(dialogs: Path | str, target: Target, taps: Sequence[Tap]) -> dict[str, Any]:
    """Return what features are of. Those of other weights, another template or other taps are other features."""
    return {
        "format": FORMAT,
        "target": target.info.name,
        "revision": target.info.revision,
        "adapter": target.info.adapter and target.info.adapter.sha256,
        "weights": target.fingerprint,
        "template_sha256": read_json(Path(dialogs) / "manifest.json").get("template_sha256"),
        "hidden_size": target.info.hidden_size,
        "taps": list(taps),
    }


def _key(dialog_id: str) -> str:
    # A prefix, because safetensors keeps a name of its own.
    return f"dialog {dialog_id}"


def _ids_key(dialog_id: str) -> str:
    return f"ids {dialog_id}"

"""Features on disk: a shard is one safetensors file of named tensors, with the checksum of each, written aside.

Letters: X any leading axes, D hidden, K outliers, W bytes of a row in 8 bits.

Two ways to store a row of D numbers:

    bfloat16   2 D bytes
    int8       D + 1 + 4 K bytes: its K largest numbers in bfloat16 with their places, and the others as int8 times a power
               of two of the row's own. The residual stream has a few channels hundreds of times as large as the rest; with
               one scale for all, the rest would be rounded away.

int8 times a power of two is exact in bfloat16, so reading gives bfloat16, and storing again what was read changes no value.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headway.heads.common.aside import file_aside
from headway.heads.common.errors import HeadwayError

Store = Literal["bfloat16", "int8"]
STORES: tuple[Store, ...] = get_args(Store)
REMEDY = "delete it, its features are then computed"
OUTLIERS = 16
"""Numbers of a row kept in bfloat16; at most one in sixteen."""


class ShardError(HeadwayError):
    """A shard that is not whole, or whose content is not what was written; `path` and `reason` say which and why."""

    def __init__(self, path: Path, reason: str, remedy: str = REMEDY) -> None:
        super().__init__(f"{path} is damaged ({reason}); {remedy}")
        self.path, self.reason = path, reason


def row_bytes(hidden_size: int, store: Store) -> int:
    """Return the bytes that the feature of one tap at one position takes."""
    return 2 * hidden_size if store == "bfloat16" else hidden_size + 1 + 4 * _num_outliers(hidden_size)


def feature_bytes(num_tokens: int, hidden_size: int, num_taps: int, store: Store) -> int:
    """Return the bytes of the features of `num_taps` taps (`last` is one) over so many tokens."""
    return num_tokens * num_taps * row_bytes(hidden_size, store)


def encode(feature_XD: Tensor, store: Store) -> Tensor:
    """Return features as they are stored: bfloat16 [X, D], or uint8 [X, W]."""
    if store == "bfloat16":
        return feature_XD.to(torch.bfloat16)
    value_XD = feature_XD.float()
    at_XK = value_XD.abs().topk(_num_outliers(value_XD.shape[-1]), -1).indices.sort(-1).values
    outlier_XK = value_XD.gather(-1, at_XK).to(torch.bfloat16)
    rest_XD = value_XD.scatter(-1, at_XK, 0.0)
    mantissa_X1, exponent_X1 = torch.frexp(rest_XD.abs().amax(-1, keepdim=True) / 127)
    exponent_X1 = exponent_X1 - (mantissa_X1 == 0.5).int()  # the least power of two that is not below
    # No code may stand for more than the least outlier: read and stored again, it would take the outlier's place.
    least_X1 = torch.ldexp(outlier_XK.float().abs().amin(-1, keepdim=True), -exponent_X1).floor().clamp(max=127)
    code_XD = torch.ldexp(rest_XD, -exponent_X1).round().clamp(-least_X1, least_X1).to(torch.int8)
    parts = (code_XD, exponent_X1.to(torch.int8), outlier_XK, at_XK.to(torch.int16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)


def decode(stored: Tensor, hidden_size: int) -> Tensor:
    """Return stored features as bfloat16 [X, D]; the inverse of `encode`, up to its rounding."""
    if stored.dtype == torch.bfloat16:
        return stored
    outliers = 2 * _num_outliers(hidden_size)
    parts = stored.split([hidden_size, 1, outliers, outliers], -1)
    # Copied even where they are contiguous, as those of a single row are: at an odd byte none is read as 16 bits.
    code, exponent, outlier, at = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    rest_XD = torch.ldexp(code.view(torch.int8).float(), exponent.view(torch.int8).int())
    return rest_XD.to(torch.bfloat16).scatter(-1, at.view(torch.int16).long(), outlier.view(torch.bfloat16))


def require_finite(feature: Tensor, what: str) -> None:
    """Raise HeadwayError when a feature is not a finite number."""
    if not bool(feature.isfinite().all()):
        raise HeadwayError(
            f"the target gives features of {what} that are not finite; run it with dtype bfloat16 or float32, whose "
            "range is larger than float16's"
        )


def write_shard(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> None:
    """Write tensors with their checksums, and `facts` (JSON), aside, and rename the file once it is on the disk.

    The same tensors give the same bytes.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    about = {**(facts or {}), "crc32": {name: _checksum(tensor) for name, tensor in tensors.items()}}
    with file_aside(path) as aside:
        # One key alone: with several, safetensors would write them in another order each time.
        save_file(tensors, aside, metadata={"headway": json.dumps(about, sort_keys=True)})


class Shard:
    """A shard opened for reading; tensors are read, and their checksums compared, when asked for.

    Raises ShardError on opening for a file that is cut short or has no checksums, and on reading for one that was changed.
    """

    def __init__(self, path: Path, remedy: str = REMEDY) -> None:
        self.path, self._remedy = path, remedy
        try:
            self._file = safe_open(path, framework="pt")
            about = json.loads((self._file.metadata() or {}).get("headway", "{}"))
        except (SafetensorError, OSError, ValueError) as error:
            raise ShardError(path, " ".join(str(error).split()), remedy) from error
        self.names: list[str] = list(self._file.keys())
        self._crc32: dict[str, int] = about.pop("crc32", {})
        self.facts: dict[str, Any] = about
        if set(self._crc32) != set(self.names):
            raise ShardError(path, "it has no checksums", remedy)

    def shape(self, name: str) -> list[int]:
        """Return the shape of a tensor without reading it."""
        return list(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        """Return a tensor. Raises ShardError unless it is what was written."""
        try:
            tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ShardError(self.path, f"{name!r}: {error}", self._remedy) from error
        if _checksum(tensor) != self._crc32[name]:
            raise ShardError(self.path, f"the checksum of {name!r} is wrong", self._remedy)
        return tensor

    def read_all(self) -> dict[str, Tensor]:
        """Return all tensors. Raises ShardError unless each is what was written."""
        return {name: self.read(name) for name in self.names}


def remove_torn(folder: Path) -> None:
    """Remove what a process that was killed while it wrote has left."""
    for path in folder.glob(".*.safetensors.*.tmp"):
        path.unlink(missing_ok=True)


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def _num_outliers(hidden_size: int) -> int:
    return max(1, min(OUTLIERS, hidden_size // 16))


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data) if tensor.numel() else 0

"""Sets of hashes for telling what was seen before, and the hash that splits rows by their id."""

from __future__ import annotations

import hashlib
from array import array


class Hashes:
    """A set of 64-bit hashes of texts in 12 to 32 bytes each, for sets too large to keep.

    Two different texts are taken for the same with probability n^2 / 2^65: 3 in a million among ten million.
    """

    def __init__(self) -> None:
        self._slots = array("Q", bytes(8 << 10))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, text: str) -> bool:
        """Take a text in, and return whether it is new."""
        value = _hash(text) or 1  # 0 marks a free slot
        if not self._put(value):
            return False
        self._count += 1
        if 3 * self._count > 2 * len(self._slots):
            old, self._slots = self._slots, array("Q", bytes(16 * len(self._slots)))
            for known in old:
                if known:
                    self._put(known)
        return True

    def _put(self, value: int) -> bool:
        slots, mask = self._slots, len(self._slots) - 1
        at = value & mask
        while slots[at]:
            if slots[at] == value:
                return False
            at = (at + 1) & mask
        slots[at] = value
        return True


def place(row_id: str) -> float:
    """Return the place of an id in [0, 1), by its SHA-256: the same in every process and whatever other rows there are.

    `train/batches.py` holds out the rows of the lowest hashes; these are the lowest places.
    """
    return int(hashlib.sha256(row_id.encode()).hexdigest()[:13], 16) / 2.0**52


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")

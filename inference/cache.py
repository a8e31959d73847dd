"""The target's key-value cache: slots behind transformers' cache interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headway.heads.common.slots import Slots


class _SlotLayer(CacheLayerMixin):
    """One decoder layer's view of the slots."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, slots: Slots, index: int) -> None:
        super().__init__()
        self.slots = slots
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.slots.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.used, 0

    def get_seq_length(self) -> int:
        return max(self.slots.length, default=0)

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """What a model of transformers is given as its cache; the decoder works on `slots`."""

    def __init__(self, num_layers: int, rows: int, capacity: int = 256, static: bool = False) -> None:
        self.slots = Slots(num_layers, rows, capacity, static)
        super().__init__(layers=[_SlotLayer(self.slots, i) for i in range(num_layers)])

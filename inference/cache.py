"""The target's key-value cache: slots behind transformers' cache interface."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from headway.heads.common.slots import Pair, Slots
from headway.heads.common.static import Placed


class SlotLayer(CacheLayerMixin):
    """One decoder layer's view of slots, or of what stands for them in a compiled pass."""

    is_sliding = False
    is_croppable = False
    is_compileable = False

    def __init__(self, slots: Slots | Placed, index: int) -> None:
        super().__init__()
        self.slots = slots
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Pair:
        return self.slots.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.used, 0

    def get_seq_length(self) -> int | Tensor:  # type: ignore[override]  # as transformers' own static caches do
        return self.slots.longest

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """What a model of transformers is given as its cache; the decoder works on `slots`."""

    def __init__(self, num_layers: int, rows: int, capacity: int = 256, static: bool = False) -> None:
        self.slots = Slots(num_layers, rows, capacity, static)
        super().__init__(layers=[SlotLayer(self.slots, i) for i in range(num_layers)])

"""An attention function for decode and verify that groups query heads instead of repeating keys.

Letters: B rows, H query heads, K key heads, G = H / K, T queries, S keys, d head size.

With a mask and fewer key heads than query heads, the stock sdpa path copies every key G times for each layer of each
pass. Here the G query heads of a key head are the queries of one head. Long queries (prefill) go to sdpa.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

NAME = "headway_grouped"
LONGEST_QUERY = 128
"""Above this many queries a repeated mask costs more than repeated keys."""


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention output [B, T, H, d] as transformers expects of an attention function.

    `attention_mask` is additive, [B, 1, T, S]; a model that makes one of its own for each head goes to sdpa.
    """
    B, H, T, d = query.shape
    K = key.shape[1]
    if T > LONGEST_QUERY or (attention_mask is not None and attention_mask.shape[1] != 1):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    G = H // K
    mask = attention_mask
    if mask is not None and T > 1 and G > 1:
        mask = _repeated(mask, G)
    grouped = query.reshape(B, K, G * T, d)
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
    # Not a view: some kernels return the axes of heads and queries swapped in memory. Contiguous, as stock functions have
    # it, for models that view it.
    return out.reshape(B, H, T, -1).transpose(1, 2).contiguous(), None


def _repeated(mask: Tensor, times: int) -> Tensor:
    """Return the mask of grouped queries: query row g * T + t of a key head is query t of its g-th head.

    All layers of a pass are given one mask; it is repeated once for them, and kept on it.
    """
    if torch.compiler.is_compiling():  # what hangs on a tensor cannot be traced, and the compiler sees what is the same
        return mask.repeat(1, 1, times, 1)
    known = mask.__dict__.get("_headway_repeated")
    if known is None or known[0] != times:
        known = mask.__dict__["_headway_repeated"] = (times, mask.repeat(1, 1, times, 1))
    repeated: Tensor = known[1]
    return repeated


AttentionInterface.register(NAME, grouped_attention)


@contextmanager
def use_grouped(model: PreTrainedModel) -> Iterator[None]:
    """Run the model's attention through `grouped_attention` inside the block; models that are not on sdpa are left alone."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before


@contextmanager
def wide_bias(config: Any, slots: int) -> Iterator[None]:
    """Inside the block, a model whose bias by distance is a table of `max_seq_len` places has one for that many slots at least.

    A draft may reach beyond the context, though no answer does. The bias of two places does not depend on the table's size.
    """
    before = getattr(config, "max_seq_len", None)
    if not isinstance(before, int) or slots <= before:
        yield
        return
    config.max_seq_len = slots
    try:
        yield
    finally:
        config.max_seq_len = before

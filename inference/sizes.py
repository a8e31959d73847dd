"""How large a target is and what a token costs, from its config alone: its modules are laid out without their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Frozen, TargetInfo
from headway.inference.target import load_config_info, read_model_config


@dataclass(frozen=True)
class Sizes:
    """A target's sizes; nothing of it was loaded."""

    info: TargetInfo
    """Without a tokenizer: its `num_tokens` is the vocabulary's size."""
    num_weights: int
    """All weights, those of experts that a token does not visit included."""
    num_active: int
    """Weights that a token is multiplied with on its way to the last feature: neither embedding nor LM head, nor what reads
    pictures or sound beside the text model."""

    def pass_flops(self, context: float) -> float:
        """Return the floating-point operations of one token on its way to the last feature, `context` tokens before it."""
        text = self.info.text_config
        heads = text.get("num_attention_heads") or 1
        width = heads * (text.get("head_dim") or self.info.hidden_size // heads)
        return 2 * self.num_active + 4 * width * context * self.info.num_layers

    @property
    def logit_flops(self) -> float:
        """Return the floating-point operations of one token's logits over the whole vocabulary."""
        return 2 * self.info.hidden_size * self.info.vocab_size


def read_sizes(name: str | Path, *, revision: str | None = None) -> Sizes:
    """Return the sizes of the target named by a hub id, a folder or a .gguf file; its config is all that is read.

    Raises HeadwayError for a config that cannot be read, or of a kind that transformers cannot lay out.
    """
    config, info = read_model_config(name, revision=revision), load_config_info(name, revision=revision)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, KeyError, ImportError, AttributeError, RuntimeError, StrictDataclassError) as e:
        raise HeadwayError(f"cannot lay out {name} from its config: {' '.join(str(e).split())}") from e
    weights = {name: weight.numel() for name, weight in model.named_parameters()}
    apart = {
        id(weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for weight in module.parameters()
    }
    if config.get_text_config() is not config:
        apart |= {id(weight) for weight in model.parameters()} - {
            id(weight) for weight in model.get_decoder().parameters()
        }
    share = _expert_share(config.get_text_config())
    active = sum(
        weight.numel() * (share if ".experts." in name else 1.0)
        for name, weight in model.named_parameters()
        if id(weight) not in apart
    )
    return Sizes(info, sum(weights.values()), round(active))


def empty_frozen(info: TargetInfo) -> Frozen:
    """Return references into a target without weights: to build heads of the real shapes, and follow what they compute."""
    embedding = torch.empty(info.vocab_size, info.hidden_size, device="meta")

    def logits(last: Tensor, rows: Tensor | None = None) -> Tensor:
        return nn.functional.linear(last, embedding if rows is None else embedding[rows])

    return Frozen(
        info=info,
        embed=lambda ids: nn.functional.embedding(ids, embedding),
        logits=logits,
        lm_head_weight=lambda: embedding,
    )


def _expert_share(config: Any) -> float:
    """Return the share of a mixture's experts that a token visits, 1 for a target without any."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    total = next((n for name in names if isinstance(n := getattr(config, name, None), int) and n), 1)
    chosen = next(
        (n for name in ("num_experts_per_tok", "moe_top_k", "top_k_experts") if (n := getattr(config, name, None))),
        total,
    )
    return min(1.0, chosen / total)

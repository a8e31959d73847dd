"""Tiny random targets, built in float32 in well under a second, and the byte tokenizer they speak.

    from tests.tiny import byte_tokenizer, build, llama12, target

`build(seed, **changes)` returns a transformers model, `target(model)` what Headway decodes with.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.inference.target import Target
from tests.data.byte_tokenizer import CHATML, byte_tokenizer

__all__ = [
    "CHATML",
    "byte_tokenizer",
    "build",
    "llama4",
    "llama8_tied",
    "llama12",
    "qwen2_padded",
    "rope_twins",
    "target",
]

VOCAB = 264
"""Ids the byte tokenizer knows. The models' vocabulary is wider: ids 264-271 are rows without a token."""

BASE: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 256,
    "bos_token_id": 257,
    "eos_token_id": 260,
    "initializer_range": 0.15,
}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPE |= {"original_max_position_embeddings": 64}


def build(seed: int = 0, attn: str = "eager", **changes: Any) -> PreTrainedModel:
    """Return a causal LM with random weights: BASE with `changes`, the same at every call."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**(BASE | changes))
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn).eval()


def llama12(attn: str = "eager") -> PreTrainedModel:
    """A llama of twelve layers; greedy paths from short prompts have clear winners (logit gaps above 1e-3)."""
    return build(4, attn, num_hidden_layers=12)


def llama8_tied(attn: str = "eager") -> PreTrainedModel:
    """A llama of eight layers whose LM head is its embedding."""
    return build(0, attn, tie_word_embeddings=True)


def llama4(attn: str = "eager") -> PreTrainedModel:
    """A llama too shallow for three taps at the usual places (2, n/2, n-3)."""
    return build(0, attn, num_hidden_layers=4)


def qwen2_padded(attn: str = "eager") -> PreTrainedModel:
    """A qwen2 whose LM head has eight rows more than the tokenizer has tokens, and whose argmax does fall there."""
    return build(10, attn, model_type="qwen2")


def rope_twins(attn: str = "eager") -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two llamas with one and the same rotary setting (theta 5e5, llama3 scaling), in the old and the new spelling."""
    old = build(8, attn, num_hidden_layers=6, rope_theta=500000.0, rope_scaling=dict(ROPE))
    new = build(8, attn, num_hidden_layers=6, rope_parameters={"rope_theta": 500000.0, **ROPE})
    return old, new


def target(model: PreTrainedModel, name: str = "tiny", mode: str | None = None) -> Target:
    """Return the Target around a model, with the byte tokenizer; `mode` set skips the probe."""
    return Target(model, byte_tokenizer(), name, mode=mode)

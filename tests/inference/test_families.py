"""The architecture matrix: for each family of transformers, which mode the probe chooses, and that the answers are its own.

Every model is tiny and random, in float32, and its windows are shorter than the text. A family whose row is here was seen
to decode as `model.generate` does, with a head that guesses and with one that knows, in chains and in trees, in a batch.
"""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from headway.heads.common.protocol import Head
from headway.inference.generate import Request, generate, plain
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import Policy
from tests.inference.helpers import POLICIES, hf_greedy, random_head
from tests.inference.test_oracle import Oracle
from tests.tiny import BASE, build

Fields = dict[str, Any]

VOCAB = 128
NEW = 24
"""Tokens of each answer: with the longest prompt more than four windows."""
GUESSED = 5
"""Tokens of each answer with the head that guesses, which gives few in a pass."""
PROMPTS = [[(step * i * i + 3 * i + 5) % 120 + 4 for i in range(size)] for step, size in ((7, 22), (11, 9), (5, 15))]
COMMON: Fields = {
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
HEAD: Fields = {"head_dim": 16}
ALL_HEADS: Fields = {"num_key_value_heads": 4}
WINDOW: Fields = {"sliding_window": 10}
MIXED: Fields = {**HEAD, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MOE: Fields = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
MLA: Fields = {
    **ALL_HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
INDEXED: Fields = {**MOE, **MLA, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}

TREE: dict[str, Fields] = {
    "afmoe": {**MIXED, **MOE, "num_dense_layers": 1},
    "apertus": HEAD,
    "arcee": HEAD,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, **HEAD},
    "axk1": {**MOE, **MLA},
    "biogpt": {},
    "bitnet": {},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {**MIXED, "logit_scale": 0.25},
    "cohere2_moe": {**MIXED, **MOE},
    "ctrl": {"dff": 64},
    "cwm": MIXED,
    "deepseek_v2": {**MOE, **MLA},
    "deepseek_v3": {**MOE, **MLA},
    "diffllama": HEAD,
    "doge": WINDOW,
    "ernie4_5": HEAD,
    "ernie4_5_moe": {**MOE, "moe_num_experts": 4, "moe_k": 2},
    "exaone": {},
    "exaone4": MIXED,
    "exaone_moe": {**MIXED, **MOE},
    "falcon": {},
    "flex_olmo": MOE,
    "gemma": HEAD,
    "gemma2": {**MIXED, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
    "gemma4_text": {
        **MIXED,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
    },
    "glm": HEAD,
    "glm4": HEAD,
    "glm4_moe": {**MOE, **HEAD},
    "glm4_moe_lite": {**MOE, **MLA},
    "gpt2": ALL_HEADS,
    "gpt_bigcode": {},
    "gpt_neox": {},
    "gpt_neox_japanese": {},
    "gpt_oss": {**MIXED, **MOE},
    "gptj": {"rotary_dim": 8},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5},
    "granite_swa": MIXED,
    "granitemoe": {**MOE, "embedding_multiplier": 3.0, "logits_scaling": 4.0},
    "granitemoe_swa": {**MIXED, **MOE},
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "hunyuan_v1_moe": {**MOE, **HEAD, "moe_topk": 2},
    "jetmoe": {**MOE, "kv_channels": 16},
    "laguna": {**MIXED, **MOE},
    "llama": {},
    "llama4_text": {
        **HEAD,
        **MOE,
        "attention_chunk_size": 10,
        "intermediate_size_mlp": 64,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "mellum": MIXED,
    "mimo_v2_flash": {**MIXED, **MOE, "v_head_dim": 8},
    "minicpm3": MLA,
    "minimax_m2": {**MOE, **HEAD},
    "minimax_m3_vl_text": {**HEAD, **MOE},
    "ministral": {**HEAD, **WINDOW},
    "mistral": {**HEAD, **WINDOW},
    "mixtral": {**HEAD, **WINDOW, **MOE},
    "modernbert-decoder": {"local_attention": 20},
    "nanochat": {},
    "nemotron": HEAD,
    "olmo": {},
    "olmo2": {},
    "olmo3": MIXED,
    "olmoe": MOE,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "persimmon": {},
    "phi": {},
    "phi3": WINDOW,
    "phimoe": {**WINDOW, **MOE},
    "qwen2": {**WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2_moe": {**MOE, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {**HEAD, **WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {**HEAD, **MOE},
    "sarvam_mla": {**MOE, **MLA},
    "seed_oss": HEAD,
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {},
    "starcoder2": WINDOW,
    "vaultgemma": {**MIXED, "query_pre_attn_scalar": 16},
    "xglm": {"ffn_dim": 64, "init_std": 0.3, "scale_embedding": False},
    "youtu": MLA,
}

SSM: Fields = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
DELTA: Fields = {
    **HEAD,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CONV: Fields = {"layer_types": ["conv", "full_attention"]}

NEWER = Version(transformers.__version__) >= Version("5.25")
"""Whether recurrent models take several tokens on a state; before, some raised an error of their `conv state`. Mamba and Jamba
answer otherwise than one by one, Nemotron-H the same."""
STATE, CHAIN = "differs" if NEWER else "conv state", "and chain verification"
LESSER: dict[str, tuple[str, str, Fields]] = {
    # ALiBi of slots: a chain's slots are its positions, a tree's are not.
    "mpt": (
        "chain",
        "agrees",
        {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 256, "initializer_range": 0.6},
    ),
    # Masks of their own, from a mask of the padding, [B, T].
    "bloom": ("replay", CHAIN, {"n_head": 4, "n_layer": 2}),
    "falcon_alibi": ("replay", CHAIN, {"model_type": "falcon", "alibi": True}),
    "openai-gpt": ("plain", "", {"n_head": 4, "n_layer": 2}),
    # A window over places in the cache.
    "gpt_neo": (
        "plain",
        "places in the cache",
        {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
    ),
    # A window in the config, as in those made from another family's, that only the cache reads.
    "llama_unread_window": ("plain", "its layers do not", {"model_type": "llama", **WINDOW}),
    # Sparse attention that keeps an index of keys beside them.
    "axk2": ("plain", "indexer", INDEXED),
    "deepseek_v32": ("plain", "indexer", INDEXED),
    "glm_moe_dsa": ("plain", "indexer", INDEXED),
    # Recurrent, with and without attention. Plain are those that begin anew when they are given several tokens at once,
    # and those that keep or hand their state elsewhere.
    "bamba": ("replay", CHAIN, {**SSM, "attn_layer_indices": [1]}),
    "falcon_h1": ("replay", CHAIN, {**SSM, "mamba_d_ssm": 128, **HEAD}),
    "falcon_mamba": ("plain", STATE, {"state_size": 8}),
    "granitemoehybrid": ("replay", CHAIN, {**SSM, **MOE, "layer_types": ["mamba", "attention"]}),
    "jamba": (
        "plain",
        STATE,
        {**MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "use_mamba_kernels": False},
    ),
    "lfm2": ("replay", CHAIN, CONV),
    "lfm2_moe": ("replay", CHAIN, {**CONV, **MOE, "num_dense_layers": 1}),
    "mamba": ("plain", STATE, {"state_size": 8}),
    "mamba2": ("replay", CHAIN, {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8}),
    "minimax": ("plain", "cache of its own", {**MOE, **HEAD, "layer_types": ["linear_attention", "full_attention"]}),
    "olmo_hybrid": ("replay", CHAIN, DELTA),
    "qwen3_5_text": ("replay", CHAIN, DELTA),
    "qwen3_next": ("replay", CHAIN, {**DELTA, **MOE}),
    "lfm3": ("replay", CHAIN, {**CONV, **MOE, **HEAD}),
    "nemotron_h": (*(("replay", CHAIN) if NEWER else ("plain", STATE)), {**SSM, **MOE, **HEAD}),
    "recurrent_gemma": (
        "plain",
        "differs",
        {"attention_window_size": 10, "block_types": ["recurrent", "attention"], "lru_width": 64},
    ),
    "rwkv": ("plain", "differs", {"attention_hidden_size": 64}),
    "zamba": (
        "plain",
        "",
        {"layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 2, "mamba_d_state": 8},
    ),
    "zamba2": (
        "plain",
        "",
        {"layers_block_type": ["mamba", "hybrid"], "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8},
    ),
}


def tiny(name: str, fields: Fields) -> PreTrainedModel:
    """Return a family's model, on sdpa where transformers has it."""
    changes = {"model_type": name, **COMMON, **fields}
    config = AutoConfig.for_model(**(BASE | changes))
    attn = "sdpa" if AutoModelForCausalLM._model_mapping[type(config)]._supports_sdpa else "eager"
    return build(3, attn, **changes)


def ask(t: Target, head: Head | None, policy: Policy | None, count: int = NEW) -> list[list[int]]:
    """Return the answers to the prompts, two rows at a time."""
    requests = [Request(p, Settings(max_new_tokens=count, eos_ids=()), id=i) for i, p in enumerate(PROMPTS)]
    results = generate(t, requests, head=head, policy=policy, batch_size=2)
    return [r.token_ids for r in sorted(results, key=lambda r: r.id)]


def truth(t: Target) -> list[list[int]]:
    """Return transformers' own answers to the prompts, once they are seen to say something and to be those of plain()."""
    want = [hf_greedy(t.model, p, NEW) for p in PROMPTS]
    assert len(set().union(*want)) > 8
    assert len({tuple(answer) for answer in want}) == len(PROMPTS)
    assert plain(t, PROMPTS[0], Settings(max_new_tokens=NEW, eos_ids=())) == want[0]
    return want


def drafter(t: Target, want: list[list[int]], ranks: tuple[int | None, ...]) -> Oracle:
    """Return a head that has the right token at one of the ranks, in turn; None leaves it out."""
    texts = [p + w for p, w in zip(PROMPTS, want, strict=True)]
    return Oracle(t, texts, lambda r, d: ranks[(r * 3 + d) % len(ranks)])


@pytest.mark.parametrize("name", TREE)
def test_tree(name: str) -> None:
    t = Target(tiny(name, TREE[name]), None, name)
    assert t.mode == "tree", t.mode_reason
    want = truth(t)
    knows, guesses = drafter(t, want, (0, 0, 1, 0, None)), random_head("eagle3", t, draft_vocab_size=None)
    for policy in POLICIES.values():
        assert ask(t, guesses, policy, GUESSED) == [w[:GUESSED] for w in want], policy
        assert ask(t, knows, policy) == want, policy


@pytest.mark.parametrize("name", LESSER)
def test_lesser(name: str) -> None:
    mode, reason, fields = LESSER[name]
    t = Target(tiny(name, fields), None, name)
    assert t.mode == mode, t.mode_reason
    assert reason in t.mode_reason
    want = truth(t)
    assert ask(t, drafter(t, want, (0, 0, 0, None)), POLICIES["dynamic"]) == want

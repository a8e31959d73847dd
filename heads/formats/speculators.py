"""The speculators library's layout, which vLLM serves by itself: `layers.0.*`, the target named in config.json.

Taps are numbered by the layer whose input they are. The target's embedding is copied into the file, as the library does.
"""

from __future__ import annotations

import shlex
from typing import Any

from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import draft_llama, draft_peagle
from headway.heads.formats.damage import MASK_TOKEN
from headway.heads.formats.layout import NOTE, TAP_IDS, Foreign, Saved, TargetWeights

VERSION = "0.9.0"
"""The release of the library whose config this is."""
OUTER = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TOKENS = 3
"""Tokens that a server drafts unless it is told otherwise."""


def write_eagle3(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE-3 head."""
    tensors, layer, taps = draft_llama.write(saved, "layers.0", "speculators")
    return _foreign(saved, tensors, layer, taps, weights, "Eagle3Speculator", TOKENS)


def write_peagle(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of a P-EAGLE head; a server drafts as many tokens as it was trained to."""
    tensors, layer, taps = draft_peagle.write(saved, "speculators")
    token, _, _ = (layer.pop(name) for name in MASK_TOKEN)
    note = layer.pop(NOTE)
    foreign = _foreign(saved, tensors, layer, taps, weights, "PEagleSpeculator", note["depths"])
    foreign.config |= {"mask_token_id": token, NOTE: note}
    return foreign


def _foreign(
    saved: Saved,
    tensors: dict[str, Tensor],
    layer: dict[str, Any],
    taps: list[int],
    weights: TargetWeights | None,
    architecture: str,
    tokens: int,
) -> Foreign:
    """Return the files: the draft's LlamaConfig goes inside, what the library names itself outside."""
    assert weights is not None, "as needs_target says"
    tensors["embed_tokens.weight"] = weights.embedding
    ids = [tap + 1 for tap in taps]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "speculators_model_type": saved.family,
        "speculators_version": VERSION,
        **{name: layer.pop(name) for name in OUTER},
        TAP_IDS: ids,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": saved.family,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": saved.info.name,
                "architectures": architectures(saved.info),
            },
        },
    }
    # What vLLM reads of the layer it reads here alone, the number of taps too.
    del layer["architectures"]
    return Foreign(tensors, config | {"transformer_layer_config": draft_llama.with_ids(layer, ids)})


def architectures(info: TargetInfo) -> list[str]:
    """Return the target's classes: as its config names them, else the causal LM of its type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN

    named = info.text_config.get("architectures")
    return list(named) if named else [KNOWN[info.model_type]] if info.model_type in KNOWN else []


def read_eagle3(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files; norm_before_residual left out means true, as vLLM reads it."""
    config, taps = _inner(foreign, info, norm_before_residual=True)
    return draft_llama.read(foreign, config, taps, info, weights)


def read_peagle(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files; norm_before_residual left out means false, and the tokens that a server is to draft are
    those that it was trained to."""
    config, taps = _inner(foreign, info, norm_before_residual=False)
    config["mask_token_id"] = foreign.config.get("mask_token_id")
    return draft_peagle.read(foreign, config, taps, asked_tokens(foreign.config), info, weights)


def _inner(foreign: Foreign, info: TargetInfo, norm_before_residual: bool) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the draft's LlamaConfig with what stands outside, and the taps."""
    outer = foreign.config
    layer = outer.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise HeadwayError("config.json has no transformer_layer_config; download or convert the head again")
    ids = outer.get(TAP_IDS) or draft_llama.usual_inputs(info)
    flags = {
        name: outer.get(name, norm_before_residual and name == "norm_before_residual")
        for name in OUTER
        if "norm" in name
    }
    config = layer | flags | {"draft_vocab_size": outer.get("draft_vocab_size")}
    return config, draft_llama.taps_of_inputs(sorted(ids))


def asked_tokens(config: dict[str, Any]) -> int | None:
    """Return how many tokens config.json lets a server draft, None where it does not say."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens > 0 else None


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the command that serves the target with the head: the folder names the target."""
    return f"vllm serve {shlex.quote(folder)}"


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return True


WRITE = {"eagle3": write_eagle3, "peagle": write_peagle}
READ = {"eagle3": read_eagle3, "peagle": read_peagle}

"""The speculators library's layout, which vLLM serves by itself: `layers.0.*`, the target named in config.json.

Taps are numbered by the layer whose input they are. The target's embedding is copied into the file, as the library does.
"""

from __future__ import annotations

import shlex
from typing import Any

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import draft_llama
from headway.heads.formats.layout import TAP_IDS, Foreign, Saved, TargetWeights

VERSION = "0.9.0"
"""The release of the library whose config this is."""
OUTER = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TOKENS = 3
"""Tokens that a server drafts unless it is told otherwise."""


def write_eagle3(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE-3 head."""
    assert weights is not None, "as needs_target says"
    tensors, layer, taps = draft_llama.write(saved, "layers.0", "speculators")
    tensors["embed_tokens.weight"] = weights.embedding
    ids = [tap + 1 for tap in taps]
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": VERSION,
        **{name: layer.pop(name) for name in OUTER},
        TAP_IDS: ids,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": TOKENS,
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
    outer = foreign.config
    layer = outer.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise HeadwayError("config.json has no transformer_layer_config; download or convert the head again")
    ids = outer.get(TAP_IDS) or draft_llama.usual_inputs(info)
    flags = {name: outer.get(name, name == "norm_before_residual") for name in OUTER if "norm" in name}
    merged = layer | flags | {"draft_vocab_size": outer.get("draft_vocab_size")}
    return draft_llama.read(foreign, merged, draft_llama.taps_of_inputs(sorted(ids)), info, weights)


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the command that serves the target with the head: the folder names the target."""
    return f"vllm serve {shlex.quote(folder)}"


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return True


WRITE = {"eagle3": write_eagle3}
READ = {"eagle3": read_eagle3}

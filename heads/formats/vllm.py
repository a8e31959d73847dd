"""vLLM's own layouts: `midlayer.*` for EAGLE-3, `layers.0.*` for EAGLE, `layers.*` for P-EAGLE, `blocks.*` for Medusa.

EAGLE-3 and P-EAGLE: taps are numbered by the layer whose input they are. Medusa: vLLM 0.32 and before; a chain of each head's best
token, so a head over a draft vocabulary is written with an LM head of all words (see medusa_blocks.widen).
"""

from __future__ import annotations

import json
import shlex
from typing import Any, cast

from headway.heads import medusa
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import draft_llama, draft_peagle, medusa_blocks
from headway.heads.formats.layout import NOTE, Foreign, Saved, TargetWeights


def write_eagle3(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE-3 head."""
    tensors, config, taps = draft_llama.write(saved, "midlayer", "vllm")
    return Foreign(tensors, draft_llama.with_ids(config, [tap + 1 for tap in taps]))


def read_eagle3(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files; ids left out are vLLM's default."""
    ids = draft_llama.written_ids(foreign.config) or draft_llama.usual_inputs(info)
    return draft_llama.read(foreign, foreign.config, draft_llama.taps_of_inputs(sorted(ids)), info, weights)


def write_peagle(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of a P-EAGLE head."""
    tensors, config, taps = draft_peagle.write(saved, "vllm")
    foreign = Foreign(tensors, draft_llama.with_ids(config, [tap + 1 for tap in taps]))
    foreign.said.append(
        "vLLM 0.16 and later draft with P-EAGLE heads, given parallel_drafting; without it they draft badly"
    )
    return foreign


def read_peagle(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files; ids left out are vLLM's default."""
    ids = draft_llama.written_ids(foreign.config) or draft_llama.usual_inputs(info)
    depths = (foreign.config.get(NOTE) or {}).get("depths")
    taps = draft_llama.taps_of_inputs(sorted(ids))
    return draft_peagle.read(foreign, foreign.config, taps, depths, info, weights)


def write_eagle(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE head. Raises HeadwayError for a bias of fc, which vLLM drops."""
    foreign = draft_llama.write_eagle(saved, "vllm", "refused")
    foreign.config["architectures"] = ["LlamaForCausalLM"]
    return foreign


def write_medusa(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of a Medusa head; the one that shares the target's LM head carries a copy of it."""
    config = cast(medusa.Config, saved.config)
    blocks, heads = medusa_blocks.split(saved, "vllm")
    foreign = Foreign({}, {})
    for (k, j), (weight, bias) in blocks.items():
        foreign.tensors[f"blocks.{k}.layers.{j}.weight"] = weight
        foreign.tensors[f"blocks.{k}.layers.{j}.bias"] = bias
    shared = config.lm_head == "shared"
    if shared:
        assert weights is not None, "as needs_target says"
        heads = [weights.lm_head]
    for k, head in enumerate(medusa_blocks.widen(heads, saved, foreign)):
        foreign.tensors[f"lm_heads.{k}.weight"] = head
    foreign.config |= {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": shared,
        "logit_scale": 1.0,
    }
    foreign.said.append("vLLM 0.32 and before read Medusa heads; later ones do not")
    return foreign


def read_medusa(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files."""
    return medusa_blocks.join(foreign, info, weights)


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the command that serves the target with the head."""
    parallel = family == "peagle"
    method: dict[str, Any] = {
        "method": "eagle3" if parallel else family,
        "model": folder,
        "num_speculative_tokens": tokens,
    }
    method |= {"parallel_drafting": True} if parallel else {}
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(json.dumps(method))}"


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return saved.family == "medusa" and cast(medusa.Config, saved.config).lm_head == "shared"


WRITE = {"eagle": write_eagle, "eagle3": write_eagle3, "medusa": write_medusa, "peagle": write_peagle}
READ = {"eagle": draft_llama.read_eagle, "eagle3": read_eagle3, "medusa": read_medusa, "peagle": read_peagle}

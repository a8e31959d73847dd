"""SGLang's EAGLE layouts: `midlayer.*` for EAGLE-3, whose taps are numbered by the layer whose output they are, on most
targets; `layers.0.*` for EAGLE, whose fc has a bias in any case.

SGLang skips what it does not find without a word, so an export here is worth a `headway check`.
"""

from __future__ import annotations

import shlex

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import draft_llama
from headway.heads.formats.layout import Foreign, Saved, TargetWeights

OUTPUTS_IF_FIRST_IS_1 = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""Targets where SGLang 0.5.23 takes ids for outputs when the first of them is 1, else for inputs."""
INPUTS_IF_LAST_IS_L = ("gpt_oss",)
"""Targets where it takes them for inputs when the greatest is the number of layers, else for outputs."""


def write_eagle3(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE-3 head. Raises HeadwayError for taps that SGLang has no number for."""
    tensors, config, taps = draft_llama.write(saved, "midlayer", "sglang", ("fc_norm", "norm_output"))
    return Foreign(tensors, draft_llama.with_ids(config, tap_ids(taps, saved.info)))


def write_eagle(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE head; where it has no bias, one of zeros is written, since SGLang adds one."""
    foreign = draft_llama.write_eagle(saved, "sglang", "needed")
    foreign.config["architectures"] = ["LlamaForCausalLMEagle"]
    return foreign


def tap_ids(taps: list[int], info: TargetInfo) -> list[int]:
    """Return the ids from which SGLang captures these outputs, ascending. Raises HeadwayError where there are none."""
    kind, last = info.model_type, info.num_layers - 1
    if kind in OUTPUTS_IF_FIRST_IS_1 and taps[0] != 1:
        if taps[0] == 0:
            raise HeadwayError(
                f"layout sglang cannot hold head.taps {taps} on a {kind} target: a first id of 1 means the output of layer 1; "
                "train without tap 0"
            )
        return [tap + 1 for tap in taps]
    if kind in INPUTS_IF_LAST_IS_L and last in taps:
        return [tap + 1 for tap in taps]
    if last in taps and not kind.startswith("gemma"):
        raise HeadwayError(
            f"layout sglang cannot hold head.taps {taps}: it hands out what enters a layer, and nothing enters after layer "
            f"{last}, the last; train without that tap"
        )
    return taps


def taps_of(ids: list[int], info: TargetInfo) -> tuple[int, ...]:
    """Return the taps that SGLang captures for ids: the inverse of `tap_ids`."""
    if info.model_type in OUTPUTS_IF_FIRST_IS_1 and ids[0] != 1:
        return draft_llama.taps_of_inputs(ids)
    if info.model_type in INPUTS_IF_LAST_IS_L and max(ids) == info.num_layers:
        return draft_llama.taps_of_inputs(ids)
    return tuple(ids)


def read_eagle3(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files; ids left out are SGLang's default."""
    ids = draft_llama.written_ids(foreign.config)
    taps = taps_of(sorted(ids), info) if ids else draft_llama.taps_of_inputs(draft_llama.usual_inputs(info))
    return draft_llama.read(foreign, foreign.config, taps, info, weights)


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the command that serves the target with the head."""
    return (
        f"python -m sglang.launch_server --model-path {shlex.quote(target)} --speculative-algorithm {family.upper()} "
        f"--speculative-draft-model-path {shlex.quote(folder)} --speculative-num-steps {tokens} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {tokens + 1}"
    )


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return False


WRITE = {"eagle": write_eagle, "eagle3": write_eagle3}
READ = {"eagle": draft_llama.read_eagle, "eagle3": read_eagle3}

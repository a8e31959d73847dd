"""The layouts of the EAGLE repository: `midlayer.*` for EAGLE-3, taps fixed to the inputs of layers 2, L/2 and L - 3;
`layers.0.*` for EAGLE, with or without a bias of fc.

Its code builds plain and linearly scaled rotary angles only, the latter always of base 10000.
"""

from __future__ import annotations

import shlex
from typing import Any

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import draft_llama
from headway.heads.formats.layout import Foreign, Saved, TargetWeights


def write_eagle3(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE-3 head. Raises HeadwayError for taps or rotary angles that the repository has not."""
    tensors, config, taps = draft_llama.write(saved, "midlayer", "eagle", known=())
    ids = [tap + 1 for tap in taps]
    fixed = draft_llama.usual_inputs(saved.info)
    if ids != fixed:
        raise HeadwayError(
            f"layout eagle cannot hold head.taps {taps}: the repository's code reads the inputs of layers {fixed}, which are "
            f"taps {[i - 1 for i in fixed]}; export --to vllm, sglang or speculators, or train with those taps"
        )
    return Foreign(tensors, draft_llama.with_ids(_angles(config), ids))


def write_eagle(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of an EAGLE head. Raises HeadwayError for rotary angles that the repository has not."""
    foreign = draft_llama.write_eagle(saved, "eagle", "kept")
    # A config that does not say otherwise means a bias.
    said = {"architectures": ["LlamaForCausalLM"], "bias": "fc.bias" in foreign.tensors}
    foreign.config = _angles(foreign.config) | said
    return foreign


def _angles(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config in the repository's spelling of its angles. Raises HeadwayError for those that its code has not."""
    kind, base = config["rope_parameters"]["rope_type"], config["rope_theta"]
    if kind != "default" and not (kind == "linear" and base == 10000.0):
        raise HeadwayError(
            f"layout eagle cannot hold rotary angles of type {kind} and base {base}: the repository's code builds plain ones, or "
            "linear ones of base 10000; export --to vllm, sglang or speculators"
        )
    if kind == "linear":
        config["rope_scaling"]["type"] = "linear"
    return config


def read_eagle3(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files, .bin or safetensors. Raises HeadwayError for ids that the repository would not read."""
    ids, fixed = draft_llama.written_ids(foreign.config), draft_llama.usual_inputs(info)
    if ids is not None and sorted(ids) != fixed:
        raise HeadwayError(
            f"config.json has taps {ids}, but the EAGLE repository's code reads the inputs of layers {fixed}; say how they are "
            "meant: --from vllm (inputs of layers) or --from sglang (outputs)"
        )
    return draft_llama.read(foreign, foreign.config, draft_llama.taps_of_inputs(fixed), info, weights)


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the command of the repository."""
    older = "" if family == "eagle3" else " --no-eagle3"  # it takes a head for EAGLE-3 unless told
    paths = f"--ea-model-path {shlex.quote(folder)} --base-model-path {shlex.quote(target)}"
    return f"python -m eagle.application.webui {paths}{older}"


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return False


WRITE = {"eagle": write_eagle, "eagle3": write_eagle3}
READ = {"eagle": draft_llama.read_eagle, "eagle3": read_eagle3}

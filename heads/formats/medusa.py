"""The layout of the Medusa repository: `{head}.{block}.linear.*`, and `{head}.{blocks}.weight` where heads have LM heads.

The repository's loader opens medusa_lm_head.pt, which is a pickle; safetensors are written, and `serve` shows the line that
makes the one from the other.
"""

from __future__ import annotations

import shlex
from typing import cast

from headway.heads import medusa
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import medusa_blocks
from headway.heads.formats.layout import Foreign, Saved, TargetWeights

FILE = "medusa_lm_head.safetensors"


def write_medusa(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of a Medusa head. Raises HeadwayError for several blocks, of which the repository keeps one."""
    config = cast(medusa.Config, saved.config)
    if config.num_layers > 1:
        raise HeadwayError(
            f"layout medusa cannot hold head.num_layers {config.num_layers}: the repository's code repeats one block, so the "
            "others would be lost; export --to tgi or vllm, or train one layer"
        )
    return write_blocks(saved, "medusa")


def write_blocks(saved: Saved, layout: str) -> Foreign:
    """Return the files, whatever the number of blocks."""
    config = cast(medusa.Config, saved.config)
    blocks, heads = medusa_blocks.split(saved, layout)
    foreign = Foreign({}, {}, FILE)
    for (k, j), (weight, bias) in blocks.items():
        foreign.tensors[f"{k}.{j}.linear.weight"] = weight
        foreign.tensors[f"{k}.{j}.linear.bias"] = bias
    for k, head in enumerate(medusa_blocks.widen(heads, saved, foreign)):
        foreign.tensors[f"{k}.{config.num_layers}.weight"] = head
    foreign.config |= {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "base_model_name_or_path": saved.info.name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "medusa_fc_bias": True,
    }
    if config.lm_head == "shared":
        foreign.config["version"] = "2"
    return foreign


def read_medusa(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of such files: .pt or safetensors, alone or in a full model, with LM heads or without."""
    return medusa_blocks.join(foreign, info, weights)


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the commands of the repository."""
    held, made = f"{folder}/{FILE}", f"{folder}/medusa_lm_head.pt"
    convert = f"import torch, safetensors.torch as s; torch.save(s.load_file({held!r}), {made!r})"
    return f"python -c {shlex.quote(convert)} && python -m medusa.inference.cli --model {shlex.quote(folder)}"


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return False


WRITE = {"medusa": write_medusa}
READ = {"medusa": read_medusa}

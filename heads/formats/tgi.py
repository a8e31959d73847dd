"""What Text Generation Inference reads: the Medusa repository's names in medusa_lm_head.safetensors.

With LM heads, any number of blocks; without, the target's is shared and one block is all it takes. A config with
`architectures` would be taken for another kind of speculator.
"""

from __future__ import annotations

import shlex
from typing import cast

from headway.heads import medusa
from headway.heads.common.errors import HeadwayError
from headway.heads.formats.layout import Foreign, Saved, TargetWeights
from headway.heads.formats.medusa import read_medusa, write_blocks


def write_medusa(saved: Saved, weights: TargetWeights | None) -> Foreign:
    """Return the files of a Medusa head. Raises HeadwayError for several blocks over the target's LM head."""
    config = cast(medusa.Config, saved.config)
    if config.lm_head == "shared" and config.num_layers > 1:
        raise HeadwayError(
            f"layout tgi cannot hold head.num_layers {config.num_layers} with head.lm_head shared: it takes one block there; "
            "export --to vllm, or train with lm_head own"
        )
    return write_blocks(saved, "tgi")


def serve(family: str, folder: str, target: str, tokens: int) -> str:
    """Return the command that serves the target, which the folder names, with the head."""
    return f"text-generation-launcher --model-id {shlex.quote(folder)} --speculate {tokens}"


def needs_target(saved: Saved) -> bool:
    """Return whether the files hold copies of the target's weights."""
    return False


WRITE = {"medusa": write_medusa}
READ = {"medusa": read_medusa}

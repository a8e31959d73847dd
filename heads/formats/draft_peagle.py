"""P-EAGLE files: those of EAGLE-3, with several layers, a `mask_hidden` and a token for what is not yet known.

vLLM reads them from 0.16 on, by `parallel_drafting`, and looks for the token under three names; all are written, since each
release knows but some of them. No field says how many tokens a head was trained to draft, but the speculators library's
`speculative_tokens`; elsewhere the note of an export does.
"""

from __future__ import annotations

import re
from typing import Any, cast

from torch import Tensor

from headway.heads import peagle
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats import draft_llama
from headway.heads.formats.damage import MASK_TOKEN
from headway.heads.formats.layout import NOTE, Foreign, Saved, TargetWeights, renamed


def tensor_names(num_layers: int, draft_vocab: bool) -> dict[str, str]:
    """Return ours -> theirs: a feature norm in the first layer, none in the others."""
    names: dict[str, str] = {}
    for i in range(num_layers):
        norms = [norm for norm in draft_llama.NORMS if i == 0 or norm != "hidden_norm"]
        names |= draft_llama.layer_names(f"layers.{i}", norms, f"layers.{i}")
    same = ["fc.weight", "mask_hidden", "norm.weight", "lm_head.weight", *(["d2t", "t2d"] if draft_vocab else [])]
    return names | {name: name for name in same}


def write(saved: Saved, layout: str) -> tuple[dict[str, Tensor], dict[str, Any], list[int]]:
    """Return tensors, a LlamaConfig's fields, and the taps in ascending order (outputs of layers).

    Raises HeadwayError for what no engine holds: the tap `last`.
    """
    config = cast(peagle.Config, saved.config)
    taps = draft_llama.ascending_taps(config, layout)
    names = tensor_names(config.num_layers, bool(config.draft_vocab_size))
    tensors = draft_llama.as_captured(renamed(saved, names, layout), config, taps, config.draft_vocab_size)
    fields = draft_llama.llama_fields(config, saved.info) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": config.num_layers,
        **draft_llama.numbers(config, taps, config.draft_vocab_size),
        **dict.fromkeys(draft_llama.FLAGS, False),
        **dict.fromkeys(MASK_TOKEN, config.mask_token_id),
        NOTE: {"depths": config.depths},
    }
    return tensors, fields, taps


def read(
    foreign: Foreign,
    config: dict[str, Any],
    taps: tuple[int, ...],
    depths: int | None,
    info: TargetInfo,
    w: TargetWeights,
) -> Saved:
    """Return the P-EAGLE head of the tensors and of a draft's LlamaConfig; sizes and layers are counted and checked against it.

    Raises HeadwayError, naming it, for a part that Headway's P-EAGLE does not have.
    """
    config = {key: value for key, value in config.items() if value is not None}
    for flag in ("norm_before_residual", "fc_norm"):
        if config.get(flag):
            raise HeadwayError(f"the head has {flag}, which headway's peagle has not; it cannot be imported")
    tensors = draft_llama.plain_names(foreign, config, w, several=True)
    draft_llama.complete("peagle", foreign, config, tensors, info, w)
    num_layers = 1 + max((int(m[1]) for n in tensors if (m := re.match(r"layers\.(\d+)\.", n))), default=0)
    names = tensor_names(num_layers, "d2t" in tensors)
    for i in range(1, num_layers):
        tensors.pop(f"layers.{i}.hidden_norm.weight", None)  # vLLM makes one in each layer, and reads the first's alone
    draft_llama.check_names("peagle", names, tensors)
    draft_llama.agree(config, "num_hidden_layers", num_layers)
    sizes = draft_llama.sizes_of("peagle", tensors, config, len(taps), info)
    words = draft_llama.count_words(config, tensors, taps, info)
    if tensors["mask_hidden"].numel() != len(taps) * info.hidden_size:
        raise HeadwayError(
            f"mask_hidden is {list(tensors['mask_hidden'].shape)}, {len(taps)} features of {info.name} are "
            f"{len(taps) * info.hidden_size} numbers; use it with the target it was trained for"
        )
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    if depths is None:
        foreign.said.append(
            f"the files do not say how many tokens the head was trained to draft: {peagle.Config.depths} are taken; depths in "
            "the head's config.json changes it"
        )
    head = peagle.Config.for_target(
        info,
        taps=taps,
        num_layers=num_layers,
        mask_token_id=mask_token(config),
        draft_vocab_size=words if "d2t" in tensors else 0,
        **({} if depths is None else {"depths": depths}),
        **sizes,
    )
    return Saved("peagle", head, {ours: tensors[theirs] for ours, theirs in names.items()}, info)


def mask_token(config: dict[str, Any]) -> int:
    """Return the token that stands for one not yet known. Raises HeadwayError where config.json names none, or several."""
    named = {name: int(config[name]) for name in MASK_TOKEN if config.get(name) is not None}
    if not named:
        raise HeadwayError(
            f"the head has mask_hidden, so it is P-EAGLE, but config.json has no {', '.join(MASK_TOKEN[:-1])} or {MASK_TOKEN[-1]}; "
            "add the token that it was trained with"
        )
    if len(set(named.values())) > 1:
        raise HeadwayError(f"config.json names several mask tokens, {named}; leave the one that it was trained with")
    return next(iter(named.values()))

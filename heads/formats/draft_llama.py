"""What the EAGLE-3 files of all engines share: tensor names, a LlamaConfig of one layer, numbers of the taps.

Headway's tap i is the output of decoder layer i. Engines write the same state as i (outputs) or as i + 1 (the input of
the layer after it). They capture states in ascending order, whatever the order in the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from headway.heads import eagle3
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Tap, TargetInfo
from headway.heads.common.vocab import from_d2t, to_t2d
from headway.heads.formats.layout import TAP_IDS, Foreign, Saved, TargetWeights, renamed

ATTENTION = tuple(f"{p}_proj" for p in "qkvo")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
PLAIN_LENGTH = ("default", "linear", "llama3")
"""Rotary types whose angles do not depend on max_position_embeddings."""


def tensor_names(layer: str, draft_vocab: bool) -> dict[str, str]:
    """Return ours -> theirs, the decoder layer being called `layer` (`midlayer` or `layers.0`)."""
    names = {"fc.weight": "fc.weight", "norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight"}
    names |= {f"layer.{p}.weight": f"{layer}.self_attn.{p}.weight" for p in ATTENTION}
    names |= {f"layer.mlp.{p}.weight": f"{layer}.mlp.{p}.weight" for p in MLP}
    names |= {f"layer.{n}.weight": f"{layer}.{n}.weight" for n in NORMS}
    return names | ({"d2t": "d2t", "t2d": "t2d"} if draft_vocab else {})


def write(saved: Saved, layer: str, layout: str) -> tuple[dict[str, Tensor], dict[str, Any], list[int]]:
    """Return tensors, a LlamaConfig's fields, and the taps in ascending order (outputs of layers).

    Raises HeadwayError for what no engine holds: the tap `last`.
    """
    config = cast(eagle3.Config, saved.config)
    if "last" in config.taps:
        raise HeadwayError(
            f"layout {layout} cannot hold head.taps {list(config.taps)}: engines hand out decoder layers before the final norm, "
            "not 'last'; train with layer numbers"
        )
    taps = sorted(cast(Sequence[int], config.taps))
    names = tensor_names(layer, bool(config.draft_vocab_size))
    tensors = renamed(saved, names, layout)
    if taps != list(config.taps):
        D = config.hidden_size
        order = [list(config.taps).index(tap) for tap in taps]
        tensors["fc.weight"] = torch.cat([tensors["fc.weight"][:, i * D : (i + 1) * D] for i in order], dim=1)
    if config.draft_vocab_size == config.vocab_size:
        # Engines keep no map where the sizes are equal, and refuse one. Sorted ids of all words are the words.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return tensors, llama_fields(config, saved.info), taps


def llama_fields(config: eagle3.Config, info: TargetInfo) -> dict[str, Any]:
    """Return the draft's LlamaConfig: everything written, nothing left to an engine's default."""
    rope = dict(config.rope)
    scaled = rope["rope_type"] != "default"
    longest = config.max_position_embeddings
    if rope["rope_type"] in PLAIN_LENGTH:
        # Engines size the draft's table of angles by it; the draft runs wherever its target does.
        longest = max(longest, info.text_config.get("max_position_embeddings") or 0)
    ends: dict[str, Any] = {
        k: info.text_config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in info.text_config
    }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "max_position_embeddings": longest,
        # Both spellings: engines on transformers 4 read the first two, on transformers 5 the last.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "num_aux_hidden_states": len(config.taps),
        **ends,
    }


def with_ids(config: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    """Return the config with tap ids in both places that engines look at."""
    return config | {TAP_IDS: ids, "eagle_config": {TAP_IDS: ids, "use_aux_hidden_state": True}}


def written_ids(config: dict[str, Any]) -> list[int] | None:
    """Return the tap ids of a config, None where it has none. Raises HeadwayError where its two places differ."""
    inner, outer = (config.get("eagle_config") or {}).get(TAP_IDS), config.get(TAP_IDS)
    if inner and outer and list(inner) != list(outer):
        raise HeadwayError(f"config.json has {TAP_IDS} {outer} and, in eagle_config, {inner}; make them equal")
    ids = inner or outer
    return [int(i) for i in ids] if ids else None


def usual_inputs(info: TargetInfo) -> list[int]:
    """Return what an engine taps when a config says nothing: the inputs of layers 2, L/2 and L - 3."""
    return [2, info.num_layers // 2, info.num_layers - 3]


def taps_of_inputs(ids: list[int]) -> tuple[int, ...]:
    """Return taps of the numbers of layers whose inputs are meant. Raises HeadwayError for the embedding, input of 0."""
    if 0 in ids:
        raise HeadwayError(
            f"the head taps the inputs of layers {ids}: that of layer 0 is the embedding, which headway does not tap; "
            "train a head on other layers"
        )
    return tuple(i - 1 for i in ids)


def read(foreign: Foreign, config: dict[str, Any], taps: tuple[int, ...], info: TargetInfo, w: TargetWeights) -> Saved:
    """Return the head of the tensors and of a draft's LlamaConfig; sizes are taken from the tensors and checked against it.

    Raises HeadwayError, naming it, for a part that Headway's EAGLE-3 does not have.
    """
    tensors = {name.removeprefix("model."): tensor for name, tensor in foreign.tensors.items()}
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    _refuse_other_kinds(tensors, config)
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not torch.equal(embedding, w.embedding.cpu().to(embedding.dtype)):
        raise HeadwayError(
            "embed_tokens.weight is not the target's embedding; headway's eagle3 reads the target's, so this head would draft "
            "worse: give the target it was trained for"
        )
    if "lm_head.weight" not in tensors and "d2t" not in tensors:
        foreign.said.append("the files hold no LM head: the target's was copied")
        tensors["lm_head.weight"] = w.lm_head.cpu().to(tensors["fc.weight"].dtype)
    names = tensor_names("layers.0", "d2t" in tensors)
    tensors.setdefault("t2d", _t2d(tensors, info)) if "d2t" in tensors else None
    for name in sorted(set(names.values()) ^ set(tensors)):
        what = "lacks tensor" if name not in tensors else "has a tensor that headway's eagle3 has not:"
        raise HeadwayError(f"the head {what} {name!r}; download or convert it again")
    if "d2t" in tensors and not torch.equal(tensors["t2d"], _t2d(tensors, info)):
        raise HeadwayError("t2d and d2t name different words; the files do not belong together")
    saved = Saved("eagle3", _config(tensors, config, taps, info), {o: tensors[t] for o, t in names.items()}, info)
    saved.tensors |= {name: tensors[name].to(torch.int64) for name in ("d2t",) if name in tensors}
    return saved


def _t2d(tensors: dict[str, Tensor], info: TargetInfo) -> Tensor:
    """Return the mask that d2t implies. Raises HeadwayError where d2t is not offsets of distinct words."""
    ids = from_d2t(tensors["d2t"].to(torch.int64))
    if ids.min() < 0 or ids.max() >= info.vocab_size or (ids.diff() <= 0).any():
        raise HeadwayError(
            f"d2t does not hold offsets of ascending target ids below {info.vocab_size} (target id = draft id + d2t); "
            "the files are damaged, or of another target"
        )
    return to_t2d(ids, info.vocab_size)


def _refuse_other_kinds(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Raise HeadwayError for options of EAGLE-3 that Headway's has not."""
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if config.get(flag) or (config.get("eagle_config") or {}).get(flag):
            raise HeadwayError(f"the head has {flag}, which headway's eagle3 has not; it cannot be imported")
    if "layers.1.self_attn.q_proj.weight" in tensors or config.get("num_hidden_layers", 1) != 1:
        raise HeadwayError("the head has more than one layer, headway's eagle3 has one; it cannot be imported")
    if config.get("hidden_act", "silu") != "silu":
        raise HeadwayError(f"the head's activation is {config['hidden_act']}, headway's eagle3 has silu")
    for name in sorted(tensors):
        if name.endswith("_proj.bias") or name in ("fc.bias", "input_norm.weight", "mask_hidden"):
            raise HeadwayError(f"the head has {name}, which headway's eagle3 has not; it cannot be imported")


def _config(
    tensors: dict[str, Tensor], given: dict[str, Any], taps: tuple[int, ...], info: TargetInfo
) -> eagle3.Config:
    """Return the head's Config, its sizes counted from the tensors and checked against the given config."""
    D, width = tensors["fc.weight"].shape
    query, key = (
        tensors["layers.0.self_attn.q_proj.weight"].shape[0],
        tensors["layers.0.self_attn.k_proj.weight"].shape[0],
    )
    heads = int(given.get("num_attention_heads") or 0)
    head_dim = int(given.get("head_dim") or (D // heads if heads else 0))
    if not heads or heads * head_dim != query or key % head_dim:
        raise HeadwayError(
            f"q_proj has {query} rows and k_proj {key}, config.json has num_attention_heads {heads} and head_dim {head_dim}; "
            "the files do not belong together"
        )
    words = tensors["lm_head.weight"].shape[0]
    counted = {
        "hidden_size": D,
        "num_key_value_heads": key // head_dim,
        "intermediate_size": tensors["layers.0.mlp.gate_proj.weight"].shape[0],
        "draft_vocab_size": words,
    }
    for name, count in counted.items():
        said = given.get(name)
        if said is not None and said != count:
            raise HeadwayError(
                f"config.json has {name} {said}, the tensors have {count}; the files do not belong together"
            )
    if info.hidden_size != D or width != len(taps) * D:
        raise HeadwayError(
            f"fc.weight is {D} x {width}, {len(taps)} taps of {info.name} (hidden size {info.hidden_size}) give "
            f"{info.hidden_size} x {len(taps) * info.hidden_size}; use it with the target it was trained for"
        )
    if "d2t" not in tensors and words != info.vocab_size:
        raise HeadwayError(
            f"the LM head has {words} words and no d2t maps them to the target's {info.vocab_size}; the files lack d2t"
        )
    config = eagle3.Config.for_target(
        info,
        taps=taps,
        draft_vocab_size=words if "d2t" in tensors else 0,
        num_attention_heads=heads,
        num_key_value_heads=counted["num_key_value_heads"],
        head_dim=head_dim,
        intermediate_size=counted["intermediate_size"],
        rms_norm_eps=given.get("rms_norm_eps") or 1e-6,
        rope=eagle3.rope_parameters(given),
        max_position_embeddings=given.get("max_position_embeddings") or 2048,
    )
    return replace(config, vocab_size=info.vocab_size)


def as_taps(values: Sequence[Tap]) -> str:
    """Return taps as a user reads them."""
    return ", ".join(str(v) for v in values)

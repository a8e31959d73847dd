"""What the EAGLE files of all engines share: tensor names, a LlamaConfig of one layer, numbers of the taps.

Headway's tap i is the output of decoder layer i. Engines write the same state as i (outputs) or as i + 1 (the input of
the layer after it). They capture states in ascending order, whatever the order in the config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from headway.heads import eagle, eagle3
from headway.heads.common.draft_layer import LayerConfig, rope_parameters
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import HeadConfig, TargetInfo
from headway.heads.common.vocab import from_d2t, to_t2d
from headway.heads.formats.layout import TAP_IDS, Foreign, Saved, TargetWeights, renamed

ATTENTION = tuple(f"{p}_proj" for p in "qkvo")
MLP = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
PLAIN_LENGTH = ("default", "linear", "llama3")
"""Rotary types whose angles do not depend on max_position_embeddings."""


FLAGS = ("fc_norm", "norm_output", "norm_before_residual")
"""Options of EAGLE-3, under the same names in Headway and in the engines that have them."""


def layer_names(layer: str, norms: Sequence[str], ours: str = "layer") -> dict[str, str]:
    """Return ours -> theirs for a draft layer, which is called `layer` there (`midlayer` or `layers.0`)."""
    names = {f"{ours}.{p}.weight": f"{layer}.self_attn.{p}.weight" for p in ATTENTION}
    names |= {f"{ours}.mlp.{p}.weight": f"{layer}.mlp.{p}.weight" for p in MLP}
    return names | {f"{ours}.{n}.weight": f"{layer}.{n}.weight" for n in norms}


def tensor_names(layer: str, draft_vocab: bool, fc_norms: int = 0) -> dict[str, str]:
    """Return ours -> theirs for an EAGLE-3 head with a draft vocabulary or without, and so many norms before fc."""
    same = ["fc.weight", "norm.weight", "lm_head.weight", *(f"fc_norm.{i}.weight" for i in range(fc_norms))]
    same += ["d2t", "t2d"] if draft_vocab else []
    return layer_names(layer, NORMS) | {name: name for name in same}


def write(
    saved: Saved, layer: str, layout: str, known: Sequence[str] = FLAGS
) -> tuple[dict[str, Tensor], dict[str, Any], list[int]]:
    """Return tensors, a LlamaConfig's fields, and the taps in ascending order (outputs of layers), of an EAGLE-3 head.

    Raises HeadwayError for what no engine holds, the tap `last`, and for options other than the `known`.
    """
    config = cast(eagle3.Config, saved.config)
    taps = ascending_taps(config, layout)
    for flag in FLAGS:
        if getattr(config, flag) and flag not in known:
            raise HeadwayError(
                f"layout {layout} cannot hold head.{flag}: its code does not know it; export --to vllm or speculators, or train "
                "without"
            )
    names = tensor_names(layer, bool(config.draft_vocab_size), len(taps) if config.fc_norm else 0)
    tensors = as_captured(renamed(saved, names, layout), config, taps, config.draft_vocab_size)
    fields = llama_fields(config, saved.info) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        **numbers(config, taps, config.draft_vocab_size),
        **{flag: getattr(config, flag) for flag in FLAGS},
    }
    return tensors, fields, taps


def ascending_taps(config: HeadConfig, layout: str) -> list[int]:
    """Return the taps in the order in which engines capture them. Raises HeadwayError for `last`, which none hands out."""
    if "last" in config.taps:
        raise HeadwayError(
            f"layout {layout} cannot hold head.taps {list(config.taps)}: engines hand out decoder layers before the final norm, "
            "not 'last'; train with layer numbers"
        )
    return sorted(cast(Sequence[int], config.taps))


def as_captured(
    tensors: dict[str, Tensor], config: HeadConfig, taps: list[int], draft_vocab_size: int
) -> dict[str, Tensor]:
    """Return the tensors for features in the order of `taps`, and without maps of a draft vocabulary that is the target's."""
    order = [list(config.taps).index(tap) for tap in taps]
    if order != sorted(order):
        D, held = config.hidden_size, dict(tensors)
        for name in ("fc.weight", "mask_hidden"):
            if name in held:
                tensors[name] = torch.cat([held[name][..., i * D : (i + 1) * D] for i in order], dim=-1)
        for new, i in enumerate(order):
            if f"fc_norm.{i}.weight" in held:
                tensors[f"fc_norm.{new}.weight"] = held[f"fc_norm.{i}.weight"]
    if draft_vocab_size == config.vocab_size:
        # Engines keep no map where the sizes are equal, and refuse one. Sorted ids of all words are the words.
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return tensors


def numbers(config: HeadConfig, taps: list[int], draft_vocab_size: int) -> dict[str, Any]:
    """Return the fields beside a LlamaConfig's that say what a draft reads and speaks."""
    return {
        "draft_vocab_size": draft_vocab_size or config.vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(taps),
        "norm_before_fc": False,
    }


def llama_fields(config: LayerConfig, info: TargetInfo) -> dict[str, Any]:
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
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": longest,
        # Both spellings: engines on transformers 4 read the first two, on transformers 5 the last.
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {k: v for k, v in rope.items() if k != "rope_theta"} if scaled else None,
        "rope_parameters": rope,
        "attention_bias": False,
        "mlp_bias": False,
        "bias": False,
        "tie_word_embeddings": False,
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
    """Return the EAGLE-3 head of the tensors and of a draft's LlamaConfig; sizes are counted and checked against it.

    Raises HeadwayError, naming it, for a part that Headway's EAGLE-3 does not have.
    """
    config = {key: value for key, value in config.items() if value is not None}
    tensors = plain_names(foreign, config, w)
    complete("eagle3", foreign, config, tensors, info, w)
    names = tensor_names("layers.0", "d2t" in tensors, len(taps) if config.get("fc_norm") else 0)
    check_names("eagle3", names, tensors)
    sizes = sizes_of("eagle3", tensors, config, len(taps), info)
    words = count_words(config, tensors, taps, info)
    head = eagle3.Config.for_target(
        info,
        taps=taps,
        draft_vocab_size=words if "d2t" in tensors else 0,
        **{flag: bool(config.get(flag)) for flag in FLAGS},
        **sizes,
    )
    return Saved("eagle3", head, {ours: tensors[theirs] for ours, theirs in names.items()}, info)


def complete(
    family: str,
    foreign: Foreign,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    info: TargetInfo,
    w: TargetWeights,
) -> None:
    """Add what files may leave out, the target's LM head and t2d. Raises HeadwayError, naming it, for what cannot be made up
    or is contradicted."""
    if config.get("norm_before_fc") or (config.get("eagle_config") or {}).get("norm_before_fc"):
        raise HeadwayError(f"the head has norm_before_fc, which headway's {family} has not; it cannot be imported")
    if "fc.weight" not in tensors:
        raise HeadwayError("the head lacks tensor 'fc.weight'; it cannot be imported")
    if "lm_head.weight" not in tensors and "d2t" not in tensors:
        foreign.said.append("the files hold no LM head: the target's was copied")
        tensors["lm_head.weight"] = w.lm_head.cpu().to(tensors["fc.weight"].dtype)
    if "d2t" in tensors:
        mask = _t2d(tensors, info)
        if not torch.equal(tensors.setdefault("t2d", mask), mask):
            raise HeadwayError("t2d and d2t name different words; the files do not belong together")
        tensors["d2t"] = tensors["d2t"].to(torch.int64)


def count_words(config: dict[str, Any], tensors: dict[str, Tensor], taps: Sequence[int], info: TargetInfo) -> int:
    """Return the words of the LM head. Raises HeadwayError where the config has other numbers, or no map leads to the target's
    words."""
    words = tensors["lm_head.weight"].shape[0]
    agree(config, "draft_vocab_size", words)
    agree(config, "num_aux_hidden_states", len(taps))
    agree(config, "target_hidden_size", info.hidden_size)
    if "d2t" not in tensors and words != info.vocab_size:
        raise HeadwayError(
            f"the LM head has {words} words and no d2t maps them to the target's {info.vocab_size}; the files lack d2t"
        )
    return words


def _t2d(tensors: dict[str, Tensor], info: TargetInfo) -> Tensor:
    """Return the mask that d2t implies. Raises HeadwayError where d2t is not offsets of distinct words."""
    d2t = tensors["d2t"]
    whole = d2t.ndim == 1 and len(d2t) and not d2t.is_floating_point()
    ids = from_d2t(d2t.to(torch.int64)) if whole else torch.full((1,), -1)
    if ids.min() < 0 or ids.max() >= info.vocab_size or (ids.diff() <= 0).any():
        raise HeadwayError(
            f"d2t does not hold offsets of ascending target ids below {info.vocab_size} (target id = draft id + d2t); "
            "the files are damaged, or of another target"
        )
    return to_t2d(ids, info.vocab_size)


def write_eagle(saved: Saved, layout: str, bias: str) -> Foreign:
    """Return the files of an EAGLE head, a LlamaConfig with them. `bias` says what becomes of fc's: `kept`, `refused` where
    the layout has none, or `needed` where it has one in any case. A draft vocabulary is left out, and said: engines draft
    with the target's whole LM head.

    Raises HeadwayError for a target that scales its embedding, which engines' drafts do not.
    """
    config = cast(eagle.Config, saved.config)
    text, kind = saved.info.text_config, saved.info.model_type
    scaled = [k for k in ("embedding_multiplier", "scale_emb", "embedding_scale") if text.get(k) not in (None, 1, 1.0)]
    if scaled or kind.startswith("gemma"):
        raise HeadwayError(
            f"layout {layout} cannot hold an eagle head of {saved.info.name}: {kind} scales its embedding, and the engine's draft "
            "reads it unscaled; train eagle3, which norms it"
        )
    names = (
        layer_names("layers.0", NORMS[2:])
        | {"fc.weight": "fc.weight"}
        | ({"fc.bias": "fc.bias"} if config.bias else {})
    )
    foreign = Foreign({}, llama_fields(config, saved.info))
    if config.draft_vocab_size:
        saved = replace(saved, tensors={n: t for n, t in saved.tensors.items() if n != "vocab_ids"})
        foreign.said.append(
            f"an EAGLE draft elsewhere speaks all of the target's words: the draft vocabulary of {config.draft_vocab_size} words "
            "is left out, the weights are the same"
        )
    foreign.tensors = renamed(saved, names, layout)
    if config.bias and bias == "refused":
        raise HeadwayError(
            f"layout {layout} cannot hold head.bias: the engine drops the bias of fc; export --to sglang or eagle, or train without"
        )
    if bias == "needed" and not config.bias:
        foreign.tensors["fc.bias"] = torch.zeros(config.hidden_size, dtype=foreign.tensors["fc.weight"].dtype)
    return foreign


def read_eagle(foreign: Foreign, info: TargetInfo, w: TargetWeights) -> Saved:
    """Return the EAGLE head of a folder. Raises HeadwayError, naming it, for a part that Headway's has not."""
    config = {key: value for key, value in foreign.config.items() if value is not None}
    tensors = plain_names(foreign, config, w)
    words = tensors.pop("lm_head.weight", None)
    if words is not None and not torch.equal(words, w.lm_head.cpu().to(words.dtype)):
        raise HeadwayError(
            "the head has an LM head of its own, headway's eagle reads the target's; it cannot be imported"
        )
    if "fc.bias" in tensors and not tensors["fc.bias"].any():
        del tensors["fc.bias"]
    names = layer_names("layers.0", NORMS[2:]) | {"fc.weight": "fc.weight"}
    names |= {"fc.bias": "fc.bias"} if "fc.bias" in tensors else {}
    check_names("eagle", names, tensors)
    head = eagle.Config.for_target(info, bias="fc.bias" in tensors, **sizes_of("eagle", tensors, config, 2, info))
    return Saved("eagle", head, {ours: tensors[theirs] for ours, theirs in names.items()}, info)


def plain_names(foreign: Foreign, config: dict[str, Any], w: TargetWeights, several: bool = False) -> dict[str, Tensor]:
    """Return the tensors under the names of `layers.0`, without the target's embedding.

    Raises HeadwayError for another embedding, another activation or, unless there may be `several`, more layers.
    """
    tensors = {name.removeprefix("model."): tensor for name, tensor in foreign.tensors.items()}
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    many = "layers.1.self_attn.q_proj.weight" in tensors or config.get("num_hidden_layers", 1) != 1
    if many and not several:
        raise HeadwayError("the head has more than one layer, headway's has one; it cannot be imported")
    if config.get("hidden_act", "silu") != "silu":
        raise HeadwayError(
            f"the head's activation is {config['hidden_act']}, headway's has silu; it cannot be imported"
        )
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is not None and not torch.equal(embedding, w.embedding.cpu().to(embedding.dtype)):
        raise HeadwayError(
            "embed_tokens.weight is not the target's embedding, which headway's heads read, so this head would draft worse: give "
            "the target it was trained for"
        )
    return tensors


def check_names(family: str, names: dict[str, str], tensors: dict[str, Tensor]) -> None:
    for name in sorted(set(names.values()) ^ set(tensors)):
        what = "lacks tensor" if name not in tensors else f"has a tensor that headway's {family} has not:"
        raise HeadwayError(f"the head {what} {name!r}; it cannot be imported")


def agree(config: dict[str, Any], name: str, count: int) -> None:
    """Raise HeadwayError where a config has another size than the tensors."""
    if config.get(name) not in (None, count):
        raise HeadwayError(
            f"config.json has {name} {config[name]}, the tensors have {count}; the files do not belong together"
        )


def sizes_of(
    family: str, tensors: dict[str, Tensor], given: dict[str, Any], inputs: int, info: TargetInfo
) -> dict[str, Any]:
    """Return a draft layer's geometry, counted from the tensors and checked against the config. fc reads `inputs` vectors."""
    for name in ("fc.weight", "layers.0.mlp.gate_proj.weight", *(f"layers.0.self_attn.{p}_proj.weight" for p in "qk")):
        if tensors[name].ndim != 2:
            raise HeadwayError(f"{name} is {list(tensors[name].shape)}, no matrix; the files are damaged")
    if given.get("vocab_size") not in (None, info.vocab_size):
        raise HeadwayError(
            f"config.json has vocab_size {given['vocab_size']}, {info.name} has {info.vocab_size}; use it with the target it was "
            "trained for"
        )
    D, width = tensors["fc.weight"].shape
    query, key = (tensors[f"layers.0.self_attn.{p}_proj.weight"].shape[0] for p in "qk")
    heads = int(given.get("num_attention_heads") or 0)
    head_dim = int(given.get("head_dim") or (D // heads if heads else 0))
    if not heads or heads * head_dim != query or key % head_dim:
        raise HeadwayError(
            f"q_proj has {query} rows and k_proj {key}, config.json has num_attention_heads {heads} and head_dim {head_dim}; "
            "the files do not belong together"
        )
    inner = tensors["layers.0.mlp.gate_proj.weight"].shape[0]
    for name, count in (("hidden_size", D), ("num_key_value_heads", key // head_dim), ("intermediate_size", inner)):
        agree(given, name, count)
    if (D, width) != (info.hidden_size, inputs * D):
        raise HeadwayError(
            f"fc.weight of the {family} head is {D} x {width}, {inputs} features of {info.name} (hidden size {info.hidden_size}) "
            f"make it {info.hidden_size} x {inputs * info.hidden_size}; use it with the target it was trained for"
        )
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": key // head_dim,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "rms_norm_eps": float(given.get("rms_norm_eps") or 1e-6),
        "rope": rope_parameters(given),
        "max_position_embeddings": given.get("max_position_embeddings") or 2048,
    }

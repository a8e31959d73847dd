"""What the Medusa files of all engines share: blocks, LM heads, counting.

An engine that knows no draft vocabulary takes each head's best token of all words. The mean of the draft vocabulary's
rows gives the mean of its words' logits, which never exceeds the greatest of them: as the row of every other word it
leaves the best token what it was, exactly.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch
from torch import Tensor

from headway.heads import medusa
from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats.layout import NOTE, Foreign, Saved, TargetWeights

Blocks = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""(head, layer) -> weight, bias"""


def split(saved: Saved, layout: str) -> tuple[Blocks, list[Tensor]]:
    """Return blocks and LM heads (none where the target's is shared).

    Raises HeadwayError for a tap that no engine hands to Medusa, and for a tensor too few or too many.
    """
    config = cast(medusa.Config, saved.config)
    if config.taps != ("last",):
        raise HeadwayError(
            f"layout {layout} cannot hold head.taps {list(config.taps)}: engines give Medusa the feature after the final norm; "
            "train with taps ['last']"
        )
    left = dict(saved.tensors)
    left.pop("vocab_ids", None)
    try:
        blocks = {
            (k, j): (left.pop(f"blocks.{k}.{j}.linear.weight"), left.pop(f"blocks.{k}.{j}.linear.bias"))
            for k in range(config.num_heads)
            for j in range(config.num_layers)
        }
        heads = [_lm_head(left, k) for k in range(config.num_heads if config.lm_head != "shared" else 0)]
    except KeyError as e:
        raise HeadwayError(f"tensor {e} of the medusa head is missing; nothing was written") from None
    if left:
        raise HeadwayError(
            f"tensor {min(left)!r} of the medusa head has no place in layout {layout}; nothing was written"
        )
    return blocks, heads


def _lm_head(left: dict[str, Tensor], k: int) -> Tensor:
    """Take an LM head out of `left`; one of low rank is multiplied out, since no engine has such."""
    if f"lm_heads.{k}.0.weight" not in left:
        return left.pop(f"lm_heads.{k}.weight")
    narrow, wide = left.pop(f"lm_heads.{k}.0.weight"), left.pop(f"lm_heads.{k}.1.weight")
    return (wide.float() @ narrow.float()).to(wide.dtype)


def widen(heads: list[Tensor], saved: Saved, foreign: Foreign) -> list[Tensor]:
    """Return the LM heads over all words of the target: a draft vocabulary's are filled up; the note says so."""
    config = cast(medusa.Config, saved.config)
    if config.rank:
        foreign.said.append(f"LM heads of rank {config.rank} were multiplied out: no engine's Medusa has factors")
    if config.lm_head != "draft":
        return heads
    ids = saved.tensors["vocab_ids"]
    if len(ids) == 1:
        raise HeadwayError(
            "an engine's Medusa cannot hold head.draft_vocab_size 1: no row leaves the one word the best; train with more words"
        )
    if len(ids) == config.vocab_size:
        return heads
    wide = []
    for head in heads:
        rows = head.float().mean(0, keepdim=True).to(head.dtype).repeat(config.vocab_size, 1)
        rows[ids] = head
        wide.append(rows)
    outside = torch.ones(config.vocab_size, dtype=torch.bool)
    outside[ids] = False
    foreign.config[NOTE] = {"filled": {"draft_vocab_size": len(ids), "like_row": int(outside.nonzero()[0])}}
    foreign.said.append(
        f"no engine's Medusa has a draft vocabulary: the {len(ids)} words became {config.vocab_size}, the others with the mean "
        "row, which is never the best; the drafts stay what they were, at the cost and size of full LM heads"
    )
    return wide


OLD = re.compile(r"(?:.*\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
OLD_HEAD = re.compile(r"(?:.*\.)?(\d+)\.(\d+)\.weight")
VLLM = re.compile(r"(?:.*\.)?blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"(?:.*\.)?lm_heads\.(\d+)\.weight")


def join(foreign: Foreign, info: TargetInfo, weights: TargetWeights) -> Saved:
    """Return the head of Medusa files in any engine's names: heads and layers are counted from the tensors.

    Raises HeadwayError where a tensor is missing, left over or of a wrong shape, and where config.json has other counts.
    """
    blocks, heads = sort_tensors(foreign.tensors)
    num_heads, num_layers = 1 + max(k for k, _, _ in blocks), 1 + max(j for _, j, _ in blocks)
    _check_counts(foreign, num_heads, num_layers)
    D, tensors = info.hidden_size, {}
    for k in range(num_heads):
        for j in range(num_layers):
            if (k, j, "weight") not in blocks:
                raise HeadwayError(f"the files lack the weight of head {k}, layer {j}; download or convert them again")
            weight = blocks[k, j, "weight"]
            if weight.shape != (D, D):
                raise HeadwayError(
                    f"head {k} has a block of {list(weight.shape)}, {info.name} has hidden size {D}; use it with the target it "
                    "was trained for"
                )
            tensors[f"blocks.{k}.{j}.linear.weight"] = weight
            tensors[f"blocks.{k}.{j}.linear.bias"] = blocks.get((k, j, "bias"), weight.new_zeros(D))
    kind, size = _lm_heads(foreign, heads, num_heads, info, weights, tensors)
    config = medusa.Config.for_target(
        info, num_heads=num_heads, num_layers=num_layers, lm_head=kind, draft_vocab_size=size or 1
    )
    return Saved("medusa", config, tensors, info)


def sort_tensors(tensors: dict[str, Tensor]) -> tuple[dict[tuple[int, int, str], Tensor], dict[int, Tensor]]:
    """Return blocks by (head, layer, weight or bias) and LM heads by head. Raises HeadwayError for any other tensor."""
    blocks, heads = {}, {}
    for name, tensor in tensors.items():
        if block := OLD.fullmatch(name) or VLLM.fullmatch(name):
            blocks[int(block[1]), int(block[2]), block[3]] = tensor
        elif head := VLLM_HEAD.fullmatch(name) or OLD_HEAD.fullmatch(name):
            heads[int(head[1])] = tensor
        else:
            raise HeadwayError(f"tensor {name!r} is none of a Medusa head's; give the folder of the heads alone")
    if not blocks:
        raise HeadwayError("the files hold no block of a Medusa head; download or convert them again")
    return blocks, heads


def stated_counts(config: dict[str, Any]) -> tuple[int | None, int | None]:
    """Return (heads, layers) as a config says, None where it does not."""
    inner = config.get("medusa") if isinstance(config.get("medusa"), dict) else {}
    heads = [config.get("medusa_num_heads"), inner.get("num_medusa_heads"), config.get("num_heads")]  # type: ignore[union-attr]
    layers = [config.get("medusa_num_layers"), inner.get("num_medusa_layers")]  # type: ignore[union-attr]
    if config.get("model_type") == "medusa" or "num_heads" in config:
        layers.append(config.get("num_hidden_layers"))
    return next((h for h in heads if h is not None), None), next((j for j in layers if j is not None), None)


def _check_counts(foreign: Foreign, num_heads: int, num_layers: int) -> None:
    for what, said, counted in zip(
        ("heads", "layers"), stated_counts(foreign.config), (num_heads, num_layers), strict=True
    ):
        if said is not None and said != counted:
            raise HeadwayError(
                f"config.json has {said} Medusa {what}, the tensors {counted}; some published configs are wrong: if the tensors "
                "are right, correct config.json"
            )


def _lm_heads(
    foreign: Foreign,
    heads: dict[int, Tensor],
    num_heads: int,
    info: TargetInfo,
    weights: TargetWeights,
    tensors: dict[str, Tensor],
) -> tuple[str, int]:
    """Add the LM heads to the tensors; return their kind and the draft vocabulary's size, 0 without one."""
    if foreign.config.get("original_lm_head") and list(heads) == [0]:
        if not torch.equal(heads[0], weights.lm_head.cpu().to(heads[0].dtype)):
            heads = dict.fromkeys(range(num_heads), heads[0])
            foreign.said.append("the one LM head is not the target's; each head got a copy of it")
        else:
            heads = {}
    if not heads:
        return "shared", 0
    if sorted(heads) != list(range(num_heads)):
        raise HeadwayError(
            f"the files have LM heads for heads {sorted(heads)}, but {num_heads} heads; some are missing"
        )
    for k, head in heads.items():
        if tuple(head.shape) != (info.vocab_size, info.hidden_size):
            raise HeadwayError(
                f"the LM head of head {k} is {list(head.shape)}, {info.name} needs {[info.vocab_size, info.hidden_size]}; "
                "use it with the target it was trained for"
            )
    filled = (foreign.config.get(NOTE) or {}).get("filled")
    ids = _draft_ids(heads, filled) if filled else None
    for k, head in sorted(heads.items()):
        tensors[f"lm_heads.{k}.weight"] = head.clone() if ids is None else head[ids]
    if ids is None:
        return "own", 0
    tensors["vocab_ids"] = ids
    return "draft", len(ids)


def _draft_ids(heads: dict[int, Tensor], filled: dict[str, Any]) -> Tensor:
    """Return the words of the draft vocabulary: the rows that are not the filled one."""
    head = heads[0]
    if filled["like_row"] >= len(head):
        raise HeadwayError(
            f"config.json names row {filled['like_row']} of {len(head)}; the files do not belong together"
        )
    ids = (head != head[filled["like_row"]]).any(1).nonzero()[:, 0]
    if len(ids) != filled["draft_vocab_size"]:
        raise HeadwayError(
            f"config.json says that {filled['draft_vocab_size']} words are of the draft vocabulary, the tensors have {len(ids)}; "
            "the files do not belong together"
        )
    return ids

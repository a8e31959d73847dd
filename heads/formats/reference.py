"""How an engine reads a folder: written from the engines' loaders, apart from the writers and readers beside it.

What an engine allocates follows from config.json alone; a tensor that is not in the files stays as it was allocated. The
forward is plain torch, without a cache. `headway check` compares it with the head.

Letters: T positions, D hidden, H query heads, K key heads, d head size, V vocabulary of the target.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import TargetInfo
from headway.heads.formats.damage import MASK_TOKEN, MOST_HEADS, TAP_IDS
from headway.heads.formats.layout import TargetWeights

IDS = TAP_IDS


@dataclass(frozen=True)
class Finding:
    """Something about a folder that a user should know."""

    kind: str
    """missing, extra, shape, not finite, vocabulary, config, changed, target: faults; random-looking: may be right."""
    what: str

    @property
    def fault(self) -> bool:
        """Whether the engine would serve the head wrongly, or not at all."""
        return self.kind != "random-looking"


class Reading(ABC):
    """A head as an engine has it in memory."""

    taps: tuple[Any, ...]
    """In the order in which the engine concatenates them, as Headway numbers them."""
    depth: int | None = None
    """Most tokens it drafts; None when it can go on."""
    asked: int | None = None
    """Tokens that config.json has a server draft, where it says so."""

    def others(self, num_layers: int) -> list[tuple[str, Reading]]:
        """Return what the folder might have been meant to be: the same weights, with taps or a flag read otherwise."""
        return []

    @abstractmethod
    def draft(self, feature_TF: Tensor, token_T: Tensor, p: int, depth: int, forced: list[int] | None) -> list[Tensor]:
        """Return the logits [V] of `depth` drafted tokens after the anchor p (which reads the feature of p and token p + 1);
        words that the head cannot draft have -inf. Each step reads the best token of the step before, or the forced one."""


def read(
    layout: str, family: str, tensors: dict[str, Tensor], config: dict[str, Any], info: TargetInfo, w: TargetWeights
) -> tuple[Reading | None, list[Finding]]:
    """Return what the engine of a layout makes of a folder, and what is wrong with it; no reading where it cannot start.

    Raises HeadwayError for a layout and family that no reading is written for.
    """
    findings = [*_bad_values(tensors), *_random_looking(tensors)]
    if family == "medusa" and layout in ("vllm", "medusa", "tgi"):
        reading, found = _read_medusa(layout, tensors, config, info, w)
    elif family == "eagle3" and layout in ("vllm", "sglang", "speculators", "eagle"):
        reading, found = _read_eagle3(layout, tensors, config, info, w)
    elif family == "peagle" and layout in ("vllm", "speculators"):
        reading, found = _read_peagle(layout, tensors, config, info, w)
    elif family == "eagle" and layout in ("vllm", "sglang", "eagle"):
        reading, found = _read_eagle(layout, tensors, config, info, w)
    else:
        raise HeadwayError(f"no reading of {family} heads in layout {layout}; give --as another layout")
    return reading, findings + found


def _bad_values(tensors: dict[str, Tensor]) -> list[Finding]:
    found = []
    for name, tensor in tensors.items():
        if tensor.numel() == 0:
            found.append(Finding("missing", f"{name} is empty"))
        elif tensor.is_floating_point() and not torch.isfinite(tensor).all():
            count = int((~torch.isfinite(tensor.float())).sum())
            found.append(Finding("not finite", f"{name}: {count} of {tensor.numel()} values"))
    return found


def _random_looking(tensors: dict[str, Tensor]) -> list[Finding]:
    """Return the matrices that look like independent draws of one distribution, as untrained ones do.

    In a trained matrix, rows and columns differ in size by more than chance; and few are as flat-tailed as a normal or
    a uniform distribution.
    """
    found = []
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or min(tensor.shape) < 32 or not tensor.is_floating_point():
            continue
        x = tensor[:4096].float()
        square = x.square()
        mean = square.mean()
        if not torch.isfinite(mean) or mean == 0:
            continue
        peak = float(square.square().mean() / mean.square())  # 3 for a normal distribution, 1.8 for a uniform one
        chance = [float(square.mean(1 - dim).var() / mean.square()) / ((peak - 1) / x.shape[1 - dim]) for dim in (0, 1)]
        if min(abs(peak - 3), abs(peak - 1.8)) < 0.15 and max(chance) < 1.6:
            found.append(Finding("random-looking", f"{name}: as independent draws, std {float(mean.sqrt()):.3g}"))
    return found


def _compare_shapes(allocated: dict[str, tuple[int, ...]], given: dict[str, Tensor]) -> list[Finding]:
    found = []
    for name in sorted(set(allocated) | set(given)):
        if name not in given:
            found.append(Finding("missing", f"{name} {list(allocated[name])}: it would stay as it was allocated"))
        elif name not in allocated:
            found.append(Finding("extra", f"{name} {list(given[name].shape)}: the engine has no place for it"))
        elif tuple(given[name].shape) != allocated[name]:
            found.append(
                Finding("shape", f"{name} is {list(given[name].shape)}, config.json makes it {list(allocated[name])}")
            )
    return found


# EAGLE-3


@dataclass
class Draft:
    """The numbers of an EAGLE-3 draft as an engine takes them from config.json."""

    hidden: int
    target_hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    eps: float
    words: int
    vocab: int
    rope: dict[str, Any]
    longest: int
    inputs: list[int]
    """Layers whose inputs are captured, ascending; num_layers is what leaves the last one."""
    num_aux: int
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    attention_bias: bool
    layers: int = 1


def _captured(layout: str, config: dict[str, Any], info: TargetInfo) -> tuple[list[int], bool]:
    """Return the layers whose inputs an engine captures, and whether config.json says so."""
    L = info.num_layers
    inner, outer = (config.get("eagle_config") or {}).get(IDS), config.get(IDS)
    ids = (inner or outer) if layout == "sglang" else (outer or inner)
    usual = sorted({2, L // 2, L - 3})
    if layout == "eagle":
        return usual, not ids or sorted(ids) == usual
    if not ids:
        return usual, False
    if layout == "sglang":
        as_inputs = (
            info.model_type in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
            and ids[0] != 1
            or info.model_type == "gpt_oss"
            and max(ids) == L
        )
        ids = ids if as_inputs else [i + 1 for i in ids]
    return sorted({int(i) for i in ids}), True


def _flat(layout: str, config: dict[str, Any], parallel: bool) -> tuple[dict[str, Any], list[Finding]]:
    """Return the fields as the engine's model sees them: what speculators names outside goes over what its layer says."""
    if layout != "speculators":
        return config, []
    found = []
    for key in ("speculators_config", "speculators_model_type", "transformer_layer_config"):
        if key not in config:
            found.append(Finding("config", f"{key} is not in config.json"))
    if "norm_before_residual" not in config and not parallel:
        found.append(
            Finding("config", "norm_before_residual is not written: vLLM takes it for true, the library for false")
        )
    flat = dict(config.get("transformer_layer_config") or {}) | {"norm_before_residual": not parallel}
    outer = [IDS, "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc"]
    if not parallel:
        outer += ["fc_norm", "norm_output"]
    elif config.get("fc_norm"):
        found.append(Finding("config", "fc_norm is true, and vLLM does not read it of a P-EAGLE head"))
    return flat | {key: config[key] for key in outer if config.get(key) is not None}, found


def _draft(
    layout: str, config: dict[str, Any], info: TargetInfo, parallel: bool = False
) -> tuple[Draft, list[Finding]]:
    """Return the draft's numbers, and the findings of its config; `parallel` is P-EAGLE.

    Raises HeadwayError where a size is missing.
    """
    config, found = _flat(layout, config, parallel)
    config = {key: value for key, value in config.items() if value is not None}
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        inner, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
    except KeyError as e:
        raise HeadwayError(f"config.json has no {e}; download or convert the head again") from None
    inputs, written = _captured(layout, config, info)
    if not written:
        found.append(
            Finding("config", f"{IDS} are not written, or are not read: the engine takes the inputs of layers {inputs}")
        )
    own = config.get("eagle_config") or {}
    named = own.get(IDS)
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    repository, of_vllm = layout == "eagle", layout in ("vllm", "speculators")

    def flag(name: str, known: bool) -> bool:
        return bool(config.get(name, False)) and known

    draft = Draft(
        hidden=hidden,
        target_hidden=int(config.get("target_hidden_size") or hidden),
        inner=inner,
        heads=heads,
        key_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        words=int(config.get("draft_vocab_size") or vocab),
        vocab=vocab,
        rope=dict(rope),
        longest=int(config.get("max_position_embeddings") or 2048),
        inputs=inputs,
        num_aux=3 if repository else int(config.get("num_aux_hidden_states") or (len(named) if named else 3)),
        norm_before_residual=flag("norm_before_residual", of_vllm),
        norm_before_fc=bool(own.get("norm_before_fc", config.get("norm_before_fc", False))) and not repository,
        fc_norm=flag("fc_norm", not repository),
        norm_output=flag("norm_output", not repository),
        attention_bias=flag("attention_bias", of_vllm),
        layers=int(config.get("num_hidden_layers", 1)) if parallel else 1,
    )
    ignored = (
        ()
        if of_vllm
        else ("norm_before_residual", *(("norm_before_fc", "fc_norm", "norm_output") if repository else ()))
    )
    found += [
        Finding("config", f"{key} is true, and the engine does not know it") for key in ignored if config.get(key)
    ]
    found += _config_faults(layout, config, draft, info)
    return draft, found


def _config_faults(layout: str, config: dict[str, Any], draft: Draft, info: TargetInfo) -> list[Finding]:
    found = []
    limits = info.text_config.get("max_position_embeddings") or 0
    # vLLM raises it by itself.
    if layout in ("sglang", "eagle") and draft.longest < limits:
        found.append(Finding("config", f"max_position_embeddings is {draft.longest}, the target's is {limits}"))
    if draft.vocab != info.vocab_size:
        found.append(Finding("config", f"vocab_size is {draft.vocab}, the target's is {info.vocab_size}"))
    if config.get("tie_word_embeddings") and draft.words != draft.vocab:
        found.append(
            Finding("config", f"tie_word_embeddings ties an LM head of {draft.words} words to {draft.vocab} rows")
        )
    if draft.target_hidden != info.hidden_size:
        found.append(
            Finding("config", f"the draft reads features of {draft.target_hidden}, the target's are {info.hidden_size}")
        )
    if draft.heads % draft.key_heads or draft.head_dim % 2:
        found.append(
            Finding(
                "shape",
                f"{draft.heads} heads of size {draft.head_dim} and {draft.key_heads} of keys: give a multiple, and an even size",
            )
        )
    if draft.inputs[0] < 1 or draft.inputs[-1] > info.num_layers or len(draft.inputs) != draft.num_aux:
        found.append(
            Finding(
                "config",
                f"taps are the inputs of layers {draft.inputs}, {draft.num_aux} are needed, of 1..{info.num_layers}",
            )
        )
    hands_out_last = info.model_type == "gpt_oss" or info.model_type.startswith("gemma")
    if layout == "sglang" and draft.inputs[-1] == info.num_layers and not hands_out_last:
        found.append(Finding("config", f"taps: SGLang captures nothing after layer {info.num_layers - 1}"))
    if int(config.get("num_hidden_layers", 1)) != draft.layers:
        found.append(Finding("config", f"num_hidden_layers is {config['num_hidden_layers']}; one layer is read here"))
    return found


def _allocated(draft: Draft) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of what an engine allocates for an EAGLE-3 or P-EAGLE draft, and reads."""
    D, wide = draft.hidden, draft.num_aux * draft.target_hidden
    shapes: dict[str, tuple[int, ...]] = {"layers.0.hidden_norm.weight": (D,)}
    for i in range(draft.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(draft, D if i else 2 * D).items()}
    shapes |= {"fc.weight": (D, wide), "norm.weight": (D,), "lm_head.weight": (draft.words, D)}
    if draft.norm_before_fc:
        shapes["input_norm.weight"] = (wide,)
    if draft.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (draft.target_hidden,) for i in range(draft.num_aux)}
    if draft.words != draft.vocab:
        shapes["d2t"] = (draft.words,)
    return shapes


def _layer_shapes(draft: Draft, read: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a layer whose attention reads so many numbers."""
    D, rows = draft.hidden, _rows(draft)
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{p}_proj.weight": (size, read) for p, size in rows.items()}
    shapes |= {f"self_attn.{p}_proj.bias": (size,) for p, size in rows.items() if draft.attention_bias}
    shapes |= {"self_attn.o_proj.weight": (D, rows["q"]), "mlp.down_proj.weight": (D, draft.inner)}
    shapes |= {f"mlp.{p}_proj.weight": (draft.inner, D) for p in ("gate", "up")}
    return shapes | {f"{p}_layernorm.weight": (D,) for p in ("input", "post_attention")}


def _read_eagle3(
    layout: str, tensors: dict[str, Tensor], config: dict[str, Any], info: TargetInfo, w: TargetWeights
) -> tuple[Reading | None, list[Finding]]:
    draft, found = _draft(layout, config, info)
    held, table, more = _load(layout, draft, _allocated(draft), _short(tensors), info, w)
    return None if held is None else Eagle3(draft, held, table), found + more


def _short(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that engines know them by."""
    return {
        re.sub(r"^(model\.)?(midlayer\.)?", lambda m: "layers.0." if m[2] else "", n): t for n, t in tensors.items()
    }


def _load(
    layout: str,
    draft: Draft,
    allocated: dict[str, tuple[int, ...]],
    given: dict[str, Tensor],
    info: TargetInfo,
    w: TargetWeights,
) -> tuple[dict[str, Tensor] | None, Tensor, list[Finding]]:
    """Return what an engine has in memory of a draft, None where it cannot draft with it; its embedding; and the findings."""
    mask, embedding = given.pop("t2d", None), given.pop("embed_tokens.weight", None)
    words = allocated["lm_head.weight"]
    if "lm_head.weight" not in given and layout in ("vllm", "speculators") and words == tuple(w.lm_head.shape):
        given["lm_head.weight"] = w.lm_head.cpu()
    found = _compare_shapes(allocated, given)
    if embedding is not None and tuple(embedding.shape) != tuple(w.embedding.shape):
        found.append(Finding("shape", f"embed_tokens.weight is {list(embedding.shape)}, not {list(w.embedding.shape)}"))
        embedding = None
    table = (w.embedding if embedding is None else embedding).cpu().float()
    fits = draft.vocab == info.vocab_size and draft.target_hidden == info.hidden_size
    found += _vocabulary(given.get("d2t"), mask, draft) if fits else []
    broken = not fits or any(f.kind in ("missing", "shape", "vocabulary") for f in found)
    if broken or draft.inputs[0] < 1 or len(draft.inputs) != draft.num_aux or draft.inputs[-1] > info.num_layers:
        return None, table, found
    return {n: t if n == "d2t" else t.float() for n, t in given.items()}, table, found


def _vocabulary(d2t: Tensor | None, mask: Tensor | None, draft: Draft) -> list[Finding]:
    """Return what is wrong with the maps between draft and target vocabulary."""
    if d2t is None or d2t.numel() == 0:
        return []
    found = []
    if d2t.is_floating_point():
        found.append(Finding("vocabulary", f"d2t is {d2t.dtype}; offsets are int64"))
    ids = d2t.long() + torch.arange(len(d2t))
    if ids.min() < 0 or ids.max() >= draft.vocab or len(ids.unique()) != len(ids):
        found.append(
            Finding(
                "vocabulary",
                f"d2t does not hold offsets of distinct ids below {draft.vocab} (target id = draft id + d2t)",
            )
        )
    elif mask is not None:
        want = torch.zeros(draft.vocab, dtype=torch.bool)
        want[ids] = True
        if mask.shape != want.shape or not torch.equal(mask.bool(), want):
            found.append(Finding("vocabulary", "t2d and d2t name different words"))
    return found


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Eagle3(Reading):
    """An EAGLE-3 draft in memory."""

    def __init__(self, draft: Draft, weights: dict[str, Tensor], embedding: Tensor) -> None:
        self.d, self.w, self.embedding = draft, weights, embedding
        self.taps: tuple[Any, ...] = tuple(i - 1 for i in draft.inputs)
        self.frequency, self.scale = _frequencies(draft)

    def others(self, num_layers: int) -> list[tuple[str, Reading]]:
        """As Reading.others: the layers below and above those tapped, and each flag of the norms the other way round."""
        found: list[tuple[str, Reading]] = []
        for by in (-1, 1):
            inputs = [i + by for i in self.d.inputs]
            if inputs[0] >= 1 and inputs[-1] <= num_layers:
                found.append((f"taps {[i - 1 for i in inputs]}", self._with(inputs=inputs)))
        for flag in ("norm_before_residual", "norm_output"):
            found.append((f"{flag} {not getattr(self.d, flag)}", self._with(**{flag: not getattr(self.d, flag)})))
        return found

    def _with(self, **changes: Any) -> Eagle3:
        return Eagle3(replace(self.d, **changes), self.w, self.embedding)

    def _fuse(self, feature_TF: Tensor) -> Tensor:
        x = feature_TF.float()
        if self.d.norm_before_fc:
            x = _rms(x, self.w["input_norm.weight"], self.d.eps)
        if self.d.fc_norm:
            parts = x.chunk(self.d.num_aux, -1)
            x = torch.cat([_rms(p, self.w[f"fc_norm.{i}.weight"], self.d.eps) for i, p in enumerate(parts)], -1)
        return x @ self.w["fc.weight"].T

    def _rotate(self, x_THd: Tensor, position_T: Tensor) -> Tensor:
        angle = position_T[:, None].float() * self.frequency
        cos, sin = angle.cos()[:, None] * self.scale, angle.sin()[:, None] * self.scale
        low, high = x_THd.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def _project(self, layer: int, name: str, x: Tensor, heads: int) -> Tensor:
        bias = self.w.get(f"layers.{layer}.self_attn.{name}_proj.bias")
        return F.linear(x, self.w[f"layers.{layer}.self_attn.{name}_proj.weight"], bias).view(len(x), heads, -1)

    def _begin(self, hidden_TD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residual and what attention reads."""
        normed = _rms(hidden_TD, self.w["layers.0.hidden_norm.weight"], self.d.eps)
        embedded = _rms(self.embedding[token_T], self.w["layers.0.input_layernorm.weight"], self.d.eps)
        return normed if self.d.norm_before_residual else hidden_TD, torch.cat([embedded, normed], -1)

    def _end(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the LM head reads and what the next step reads."""
        out = _rms(hidden_TD, self.w["norm.weight"], self.d.eps)
        return out, out if self.d.norm_output else hidden_TD

    def _layer(
        self, hidden_TD: Tensor, token_T: Tensor, first: int, seen: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return what the LM head reads, what the next step reads, and all keys and values."""
        residual, x = self._begin(hidden_TD, token_T)
        hidden, seen = self._block(0, residual, x, first, seen)
        return *self._end(hidden), seen

    def _block(
        self, layer: int, residual: Tensor, x: Tensor, first: int, seen: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the output of a layer whose attention reads x at positions from `first` on, and all keys and values."""
        w, T = {n.removeprefix(f"layers.{layer}."): t for n, t in self.w.items()}, len(x)
        position = torch.arange(first, first + T)
        q = self._rotate(self._project(layer, "q", x, self.d.heads), position)
        k = self._rotate(self._project(layer, "k", x, self.d.key_heads), position)
        v = self._project(layer, "v", x, self.d.key_heads)
        if seen is not None:
            k, v = torch.cat([seen[0], k]), torch.cat([seen[1], v])
        group = self.d.heads // self.d.key_heads
        score = torch.einsum("thd,shd->hts", q, k.repeat_interleave(group, 1)) * self.d.head_dim**-0.5
        later = torch.arange(len(k))[None] > torch.arange(len(k) - T, len(k))[:, None]
        mixed = torch.einsum(
            "hts,shd->thd", score.masked_fill(later, -torch.inf).softmax(-1), v.repeat_interleave(group, 1)
        )
        hidden = residual + mixed.flatten(1) @ w["self_attn.o_proj.weight"].T
        x = _rms(hidden, w["post_attention_layernorm.weight"], self.d.eps)
        gate = F.silu(x @ w["mlp.gate_proj.weight"].T) * (x @ w["mlp.up_proj.weight"].T)
        return hidden + gate @ w["mlp.down_proj.weight"].T, (k, v)

    def _logits(self, out_D: Tensor) -> Tensor:
        logits = self.w["lm_head.weight"] @ out_D
        if "d2t" not in self.w:
            return logits
        wide = torch.full((self.d.vocab,), -torch.inf)
        wide[torch.arange(self.d.words) + self.w["d2t"].long()] = logits
        return wide

    def draft(self, feature_TF: Tensor, token_T: Tensor, p: int, depth: int, forced: list[int] | None) -> list[Tensor]:
        """As Reading.draft."""
        out, hidden, seen = self._layer(self._fuse(feature_TF[: p + 1]), token_T[1 : p + 2], 0, None)
        drafted = [self._logits(out[-1])]
        while len(drafted) < depth:
            token = int(drafted[-1].argmax()) if forced is None else forced[len(drafted) - 1]
            out, hidden, seen = self._layer(hidden[-1:], torch.tensor([token]), p + len(drafted), seen)
            drafted.append(self._logits(out[-1]))
        return drafted


def _read_peagle(
    layout: str, tensors: dict[str, Tensor], config: dict[str, Any], info: TargetInfo, w: TargetWeights
) -> tuple[Reading | None, list[Finding]]:
    draft, found = _draft(layout, config, info, parallel=True)
    given, allocated = _short(tensors), _allocated(draft)
    wide = draft.num_aux * draft.target_hidden
    allocated["mask_hidden"] = (1, 1, wide)
    if "mask_hidden" in given and given["mask_hidden"].numel() == wide:
        given["mask_hidden"] = given["mask_hidden"].view(1, 1, -1)
    for i in range(1, draft.layers):
        given.pop(f"layers.{i}.hidden_norm.weight", None)  # there is one, which nothing reads
    held, table, more = _load(layout, draft, allocated, given, info, w)
    token, asked, about = _parallel(layout, config, info)
    if held is None or token is None:
        return None, found + more + about
    reading = PEagle(draft, held, table, token)
    reading.asked = asked
    return reading, found + more + about


def _parallel(layout: str, config: dict[str, Any], info: TargetInfo) -> tuple[int | None, int | None, list[Finding]]:
    """Return the token at positions not yet known, the tokens that a server is to draft, and the findings."""
    found, asked = [], None
    named = {key: config[key] for key in MASK_TOKEN if config.get(key) is not None}
    if layout == "speculators":
        named = {key: token for key, token in named.items() if key == "mask_token_id"}
        methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
        asked = methods[0].get("speculative_tokens")
        if asked is None:
            found.append(Finding("config", "speculators_config has no speculative_tokens, and vLLM does not start"))
    if not named:
        return None, asked, [*found, Finding("config", "no mask_token_id in config.json, and vLLM does not start")]
    token = next(iter(named.values()))
    if len(set(named.values())) > 1:
        found.append(Finding("config", f"mask tokens {named} differ: it depends on vLLM's release which is read"))
    if not 0 <= token < info.vocab_size:
        found.append(Finding("config", f"the mask token is {token}, the target has ids below {info.vocab_size}"))
        return None, asked, found
    return token, asked, found


class PEagle(Eagle3):
    """A P-EAGLE draft in memory: all tokens in one pass, those to come read `mask_hidden` and the mask token."""

    def __init__(self, draft: Draft, weights: dict[str, Tensor], embedding: Tensor, token: int) -> None:
        super().__init__(draft, weights, embedding)
        self.token = token

    def others(self, num_layers: int) -> list[tuple[str, Reading]]:
        """As Eagle3.others, but for what is fed back, which nothing is."""
        return [(what, other) for what, other in super().others(num_layers) if "norm_output" not in what]

    def _with(self, **changes: Any) -> PEagle:
        return PEagle(replace(self.d, **changes), self.w, self.embedding, self.token)

    def draft(self, feature_TF: Tensor, token_T: Tensor, p: int, depth: int, forced: list[int] | None) -> list[Tensor]:
        """As Reading.draft; no depth reads the tokens of those before it, nor the forced ones."""
        mask = self.w["mask_hidden"].view(1, -1).expand(depth - 1, -1)
        token = torch.cat([token_T[1 : p + 2], torch.full((depth - 1,), self.token)])
        hidden, x = self._begin(self._fuse(torch.cat([feature_TF[: p + 1].float(), mask])), token)
        for i in range(self.d.layers):
            if i:
                x = _rms(hidden, self.w[f"layers.{i}.input_layernorm.weight"], self.d.eps)
            hidden, _ = self._block(i, hidden, x, 0, None)
        out, _ = self._end(hidden[p:])
        return [self._logits(o) for o in out]


class Eagle(Eagle3):
    """An EAGLE draft in memory: it reads the feature after the final norm, and drafts with the target's LM head."""

    def __init__(self, draft: Draft, weights: dict[str, Tensor], w: TargetWeights) -> None:
        super().__init__(draft, weights, w.embedding.cpu().float())
        self.w |= {"lm_head.weight": w.lm_head.cpu().float()}
        self.taps = ("last",)

    def others(self, num_layers: int) -> list[tuple[str, Reading]]:
        """As Reading.others: nothing else could be meant."""
        return []

    def _fuse(self, feature_TF: Tensor) -> Tensor:
        return feature_TF.float()

    def _begin(self, hidden_TD: Tensor, token_T: Tensor) -> tuple[Tensor, Tensor]:
        fused = F.linear(
            torch.cat([self.embedding[token_T], hidden_TD], -1), self.w["fc.weight"], self.w.get("fc.bias")
        )
        return fused, fused

    def _end(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_TD, hidden_TD


def _read_eagle(
    layout: str, tensors: dict[str, Tensor], config: dict[str, Any], info: TargetInfo, w: TargetWeights
) -> tuple[Reading | None, list[Finding]]:
    # An EAGLE draft has no taps to write; the numbers are those of an EAGLE-3 draft that taps as it should.
    plain = config | {IDS: [1, 2, 3], "eagle_config": None, "num_aux_hidden_states": None, "draft_vocab_size": None}
    draft, found = _draft("vllm", plain, info)
    found = [finding for finding in found if "taps" not in finding.what]
    if layout != "vllm" and draft.longest < (info.text_config.get("max_position_embeddings") or 0):
        found.append(Finding("config", f"max_position_embeddings is {draft.longest}, below the target's"))
    D, kept = draft.hidden, ("self_attn", "mlp", "post_attention_layernorm")
    allocated = {
        n: shape for n, shape in _allocated(draft).items() if n.startswith("layers.0.") and n.split(".")[2] in kept
    }
    allocated["fc.weight"] = (D, 2 * D)
    allocated |= {f"layers.0.self_attn.{p}_proj.weight": (rows, D) for p, rows in _rows(draft).items()}
    # SGLang's fc has a bias whatever the config says, the repository's unless it says no, vLLM's never.
    if layout == "sglang" or (layout == "eagle" and config.get("bias", True)):
        allocated["fc.bias"] = (D,)
    given = {n.removeprefix("model."): t for n, t in tensors.items()}
    embedding = given.pop("embed_tokens.weight", None)
    if layout == "sglang":
        given.pop("lm_head.weight", None)
    found += _compare_shapes(allocated, given)
    if embedding is not None and not torch.equal(embedding, w.embedding.cpu().to(embedding.dtype)):
        found.append(Finding("config", "embed_tokens.weight is not the target's embedding"))
    if draft.hidden != info.hidden_size:
        found.append(Finding("config", f"hidden_size is {draft.hidden}, the target's is {info.hidden_size}"))
        return None, found
    if any(f.kind in ("missing", "shape") for f in found):
        return None, found
    return Eagle(draft, {name: given[name].float() for name in allocated}, w), found


def _rows(draft: Draft) -> dict[str, int]:
    """Return the rows of the attention's projections."""
    return {
        "q": draft.heads * draft.head_dim,
        "k": draft.key_heads * draft.head_dim,
        "v": draft.key_heads * draft.head_dim,
    }


def _frequencies(draft: Draft) -> tuple[Tensor, float]:
    """Return the rotary frequencies [d / 2] and the factor on cosine and sine."""
    rope = dict(draft.rope)
    kind, base = rope.get("rope_type") or rope.get("type") or "default", float(rope.get("rope_theta", 10000.0))
    plain = base ** -(torch.arange(0, draft.head_dim, 2).float() / draft.head_dim)
    if kind == "default":
        return plain, 1.0
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        # Long waves are stretched, short ones kept, those between blended.
        turns = rope["original_max_position_embeddings"] * plain / (2 * torch.pi)
        blend = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        blend = blend.clamp(0, 1)
        return blend * plain + (1 - blend) * plain / rope["factor"], 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise HeadwayError(f"config.json has rotary angles of type {kind!r}, which is unknown here")
    config = LlamaConfig(
        hidden_size=draft.hidden,
        num_attention_heads=draft.heads,
        head_dim=draft.head_dim,
        max_position_embeddings=draft.longest,
        rope_parameters=rope,
    )
    frequency, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequency, float(scale)


# Medusa


def _medusa_names(layout: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under one set of names: block.K.J.weight, block.K.J.bias, words.K."""
    named = {}
    for name, tensor in tensors.items():
        short = name.rsplit("medusa_head.", 1)[-1].rsplit("medusa_heads.", 1)[-1]
        parts = short.split(".")
        if parts[0] == "blocks" and len(parts) == 5 and parts[2] == "layers" and layout == "vllm":
            short = f"block.{parts[1]}.{parts[3]}.{parts[4]}"
        elif parts[0] == "lm_heads" and len(parts) == 3 and layout == "vllm":
            short = f"words.{parts[1]}"
        elif len(parts) == 4 and parts[2] == "linear":
            short = f"block.{parts[0]}.{parts[1]}.{parts[3]}"
        elif len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            short = f"words.{parts[0]}"
        named[short] = tensor
    return named


def _medusa_numbers(
    layout: str, config: dict[str, Any], info: TargetInfo
) -> tuple[int | None, int | None, bool, bool, list[Finding]]:
    """Return heads, layers, whether blocks have biases, whether the LM head is one for all; and findings of the config."""
    found = []
    if layout == "vllm":
        # vLLM takes any key with "num" and "heads" in it, or "layers"; its sizes have defaults of their own.
        heads = ([v for k, v in config.items() if "num" in k and "heads" in k] or [5])[-1]
        layers = ([v for k, v in config.items() if "num" in k and "layers" in k] or [1])[-1]
        bias, shared = bool(config.get("medusa_fc_bias", False)), bool(config.get("original_lm_head", False))
        width = config.get("hidden_size", 4096)
        if width != info.hidden_size:
            found.append(Finding("config", f"hidden_size is {width}, the target's is {info.hidden_size}"))
        if config.get("truncated_vocab_size", info.vocab_size) != info.vocab_size:
            found.append(Finding("config", "truncated_vocab_size: vLLM cannot load a Medusa head's draft vocabulary"))
    else:
        heads, layers, bias = config.get("medusa_num_heads"), config.get("medusa_num_layers"), True
        shared = str(config.get("version", "")) == "2"
        if layout == "tgi" and "architectures" in config:
            found.append(Finding("config", "architectures: TGI would take the head for another kind of speculator"))
        if (layers or 0) > 1 and (layout == "medusa" or shared):
            found.append(Finding("config", f"{layers} layers: the code that reads this layout takes one"))
    return heads, layers, bias, shared, found


def _read_medusa(
    layout: str, tensors: dict[str, Tensor], config: dict[str, Any], info: TargetInfo, w: TargetWeights
) -> tuple[Reading | None, list[Finding]]:
    D, V = info.hidden_size, info.vocab_size
    config = {key: value for key, value in config.items() if value is not None}
    heads, layers, bias, shared, found = _medusa_numbers(layout, config, info)
    for number in (heads, layers):
        if number is not None and not (isinstance(number, int) and 0 <= number <= MOST_HEADS):
            return None, [*found, Finding("config", f"{number!r:.80} heads or layers cannot be; correct config.json")]
    if not heads or not layers:
        return None, [*found, Finding("config", "the number of heads or of layers is not in config.json")]
    given = _medusa_names(layout, tensors)
    allocated: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        for j in range(layers):
            allocated[f"block.{k}.{j}.weight"] = (D, D)
            allocated |= {f"block.{k}.{j}.bias": (D,)} if bias else {}
    words = [] if shared and layout != "vllm" else [f"words.{k}" for k in range(1 if shared else heads)]
    allocated |= dict.fromkeys(words, (V, D))
    found += _compare_shapes(allocated, given)
    if any(f.kind in ("missing", "shape") for f in found):
        return None, found
    kept = {name: given[name].float() for name in allocated}
    matrices = [kept[name] for name in words] or [w.lm_head.cpu().float()]
    return Medusa(heads, layers, kept, matrices * heads if shared else matrices), found


class Medusa(Reading):
    """Medusa heads in memory; engines give them the feature after the final norm."""

    taps = ("last",)

    def __init__(self, heads: int, layers: int, weights: dict[str, Tensor], words: list[Tensor]) -> None:
        self.depth, self.layers, self.w, self.words = heads, layers, weights, words

    def draft(self, feature_TF: Tensor, token_T: Tensor, p: int, depth: int, forced: list[int] | None) -> list[Tensor]:
        """As Reading.draft; heads see neither one another's tokens nor the forced ones."""
        drafted = []
        for k in range(depth):
            x = feature_TF[p].float()
            for j in range(self.layers):
                x = x + F.silu(F.linear(x, self.w[f"block.{k}.{j}.weight"], self.w.get(f"block.{k}.{j}.bias")))
            drafted.append(self.words[k] @ x)
        return drafted

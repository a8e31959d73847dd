"""The frozen language model: loads it, runs a tree through it, hands out features.

Letters: B rows, N new tokens (tree nodes), T positions, S slots, D hidden, F tap width, V vocabulary.

With cache.py, attention.py and probe.py this is all that touches transformers' model internals.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import itertools
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import AdapterInfo, Frozen, Tap, TargetInfo
from headway.heads.common.slots import seen_slots
from headway.inference.adapter import CONFIG as ADAPTER_CONFIG
from headway.inference.adapter import adapted, attach, attached, beside_weights, dense_weights, read_adapter
from headway.inference.attention import use_grouped, wide_bias
from headway.inference.cache import SlotCache
from headway.inference.compiled import BACKEND, Backend, CompiledTarget, check_compiler
from headway.inference.packed import Packed, pack
from headway.inference.replay import ReplayCache

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
DTYPES |= {"float16": torch.float16, "fp16": torch.float16}
PASS_TOKENS = {"cpu": 24, "cuda": 256}
"""What a pass costs beside its tokens, in tokens: reading the weights, mostly."""
LOADING_ERRORS = (OSError, ValueError, ImportError, TypeError, StrictDataclassError, SafetensorError)
QUANTISER_ERRORS = (RuntimeError, NameError)
"""How transformers and optimum fail, besides, where what a quantised target needs is half installed."""
LIBRARIES = {"gptq": "gptqmodel with optimum", "awq": "gptqmodel", "compressed-tensors": "compressed-tensors"}
"""What runs weights quantised by a method, as pip calls it, where transformers does not say so itself."""
FEW_TOKENS = 8
"""Tokens in a pass of speculative decoding, about: what the dtype `auto` is chosen for unless told otherwise."""


@dataclass
class Output:
    """What a forward returns: logits [B, n, V] of the positions asked for, features [B, N, F] of the taps."""

    logits_BNV: Tensor
    tap_BNF: Tensor | None


class Target:
    """A frozen causal LM of transformers, unmodified, with what a head needs of it; it may carry a LoRA adapter."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        revision: str | None = None,
        *,
        mode: str | None = None,
        adapter: AdapterInfo | None = None,
    ) -> None:
        model, adapter = attached(model, adapter, name)
        self.model = model.eval().requires_grad_(False)
        _unpack(self.model)
        self._adapted = adapted(model)
        self.tokenizer = tokenizer
        self.text_config = model.config.get_text_config()
        # Some name their LM head `decoder`, and it is what they hand out as one.
        self.decoder, self.layers = _find_layers(
            (model.get_decoder(), model.base_model), self.text_config.num_hidden_layers
        )
        self.info = TargetInfo(
            name=name,
            revision=revision,
            model_type=self.text_config.model_type,
            hidden_size=self.text_config.hidden_size,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            num_tokens=len(tokenizer) if tokenizer is not None else self.text_config.vocab_size,
            num_layers=self.text_config.num_hidden_layers,
            text_config=_plain_config(self.text_config),
            adapter=adapter,
        )
        parameters = inspect.signature(type(model).forward).parameters
        self.cache_kwarg = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._windows = _windows(self.text_config)
        self._fingerprint: str | None = None  # of the whole, once it is split
        self._packed = pack(model) if self._adapted else Packed(model)
        self.frozen = self._references(model.get_input_embeddings(), model.get_output_embeddings())
        self.compiled: CompiledTarget | None = None
        """Its compiled passes, while there are any."""
        self.compiled_reason = ""
        """Why there are none though they were asked for; else empty."""
        self.mode = ""  # none yet: the probe makes caches
        self.max_positions = usable_positions(_plain_config(self.text_config))
        """Longest context."""
        if mode is not None:
            self.mode_reason = "set by the caller"
        elif "local" in _attention_kinds(self.text_config):
            # Nothing that the probe's short text would show.
            mode, self.mode_reason = "plain", "its local attention counts places in the cache, not positions"
        else:
            from headway.inference.probe import heeds_window, probe

            mode, self.mode_reason = probe(self)
            if mode != "plain" and self._windows.get("all") and not heeds_window(self):
                # `model.generate` reads the prompt without a window and then cuts the cache to one.
                mode, self.mode_reason = (
                    "plain",
                    "its config has a window that its cache keeps to and its layers do not",
                )
        self.mode = mode

    @staticmethod
    def load(
        name: str | Path,
        *,
        dtype: str | torch.dtype = "float32",
        device: str = "cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
        tokens: int = FEW_TOKENS,
        adapter: str | Path | None = None,
        merge_adapter: bool = False,
        compile: bool = False,
    ) -> Target:
        """Return the target named by a hub id, a folder or a .gguf file.

        `dtype` "auto" is the `fast_dtype` of the device for passes of that many tokens. `adapter` is a LoRA of PEFT, a folder
        or a hub id (owner/name@revision), put on it; `merge_adapter` adds it to the weights, which runs as fast as none.
        `compile` calls its `compile`.

        Raises HeadwayError when one cannot be found, the adapter is another model's, the dtype is unknown, or torch.compile
        does not work here.
        """
        name = str(name)
        if compile:
            check_compiler(device)
        check_merge(adapter, merge_adapter)
        if dtype == "auto":
            dtype = fast_dtype(device, tokens)
        torch_dtype = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
        if torch_dtype is None:
            raise HeadwayError(f"unknown dtype {dtype!r}; allowed: auto, {', '.join(DTYPES)}")
        source, extra = _source(name)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=torch_dtype, revision=revision, trust_remote_code=trust_remote_code, **extra
            )
        except (*LOADING_ERRORS, *QUANTISER_ERRORS) as e:
            quantised = _quantised_by(name, revision)
            if isinstance(e, QUANTISER_ERRORS) and not quantised:
                raise  # a full GPU, say
            first = (str(e).strip().splitlines() or [type(e).__name__])[0]
            raise HeadwayError(
                f"cannot load target {name!r}: {first} Give a hub id, a model folder or a .gguf file{quantised}"
            ) from e
        if adapted(model):  # transformers puts on what it finds in a repository of an adapter
            raise _is_adapter(name, model.name_or_path or "")
        tokenizer = load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)
        commit = getattr(model.config, "_commit_hash", None)
        known = None
        if adapter is not None:
            _, known = attach(model, adapter, merge=merge_adapter)  # type: ignore[arg-type]
            _say_adapter(name, known)
        target = Target(model.to(device), tokenizer, name, commit, adapter=known)  # type: ignore[arg-type]
        configured = getattr(target.text_config, "max_position_embeddings", None) or 0
        if target.max_positions < configured:
            print(
                f"headway: {name} is used up to {target.max_positions} of its {configured} tokens: beyond that its rotary "
                "angles depend on the longest row of a batch",
                file=sys.stderr,
            )
        if target.mode != "tree":
            print(f"headway: {name} runs in {target.mode} mode: {target.mode_reason}", file=sys.stderr)
        if compile:
            target.compile()
        return target

    def compile(self, backend: Backend = BACKEND) -> None:
        """Compile the passes over trees, and the draft steps of the heads that draft for the target, as they come.

        `backend` is what torch.compile takes; inductor, on a GPU with CUDA graphs, unless given. The first pass of each size takes
        long, minutes on a CPU. A target that cannot be compiled says so on stderr, and runs as it is; `compiled_reason` has
        the reason.

        Raises HeadwayError where torch.compile does not work on this machine.
        """
        if self.mode in ("tree", "chain"):
            if backend == BACKEND:
                check_compiler(str(self.device))
            self.compiled, self.compiled_reason = CompiledTarget(self, backend), ""
            return
        self.compiled_reason = f"it runs in {self.mode} mode"
        print(f"headway: {self.info.name} is not compiled: {self.compiled_reason}", file=sys.stderr)

    @property
    def packed(self) -> Packed:
        """The packed copies of its linear weights, those of an adapter on it included."""
        # An adapter may be trained where it is, or merged, by who holds the model.
        return pack(self.model) if self._adapted else self._packed

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating dtype."""
        return self.model.dtype

    @property
    def dtype_name(self) -> str:
        """The dtype as it is written: float32, bfloat16, float16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter lives."""
        return self.model.device

    @property
    def carries(self) -> str:
        """How it carries an adapter, which costs time where it is not in the weights: `adapter attached`, `adapter merged`, or
        nothing where there is none."""
        if self.info.adapter is None:
            return ""
        return "adapter attached" if beside_weights(self.model) else "adapter merged"

    @property
    def fingerprint(self) -> str:
        """A digest of a few numbers of every weight, the same in whatever dtype the model was loaded; of a quantised one,
        whose scales the dtype may round, in the same dtype."""
        if self._fingerprint is not None:
            return self._fingerprint
        digest = hashlib.sha256()
        for name, weight in self.model.named_parameters():
            few = _dense(weight).detach().flatten()[:8].to("cpu", torch.bfloat16)
            digest.update(f"{name} {tuple(weight.shape)} {few.tolist()}".encode())
        for name, module in self.model.named_modules():
            if _keeps_codes(module) and (first := _stands_for(module, self.dtype, inputs=1)) is not None:
                digest.update(f"{name} {first[:64].flatten().to('cpu', torch.bfloat16).tolist()}".encode())
        return digest.hexdigest()[:16]

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, from the generation config, else the config, else the tokenizer."""
        return _end_ids([getattr(self.model, "generation_config", None), self.text_config, self.tokenizer])

    def shard(self, device: torch.device) -> None:
        """Split the decoder layers over all processes (FSDP2) and move the target to `device`.

        Each pass then gathers one layer at a time, so all processes have to make the same number of passes. Embedding, last
        norm and LM head stay whole. Raises HeadwayError for a target without a list of layers, and for one with an adapter.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not self.layers:
            raise HeadwayError(f"{self.info.name} has no list of decoder layers to split; train without shard_target")
        if self._adapted:
            raise HeadwayError("the layers of a target with an adapter are not split; give merge_adapter=true")
        self._fingerprint = self.fingerprint
        self._packed.drop("its weights are split over processes")
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        for layer in self.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        self.model.to(device)  # type: ignore[arg-type]

    def new_cache(self, rows: int, capacity: int = 256) -> SlotCache:
        """Return an empty cache for `rows` rows; in replay mode a ReplayCache, which is used alike."""
        if self.mode == "replay":
            return self.replay_cache(rows)  # type: ignore[return-value]
        return SlotCache(self.info.num_layers, rows, capacity, self.compiled is not None)

    def replay_cache(self, rows: int) -> ReplayCache:
        """Return an empty cache for `rows` rows of chains, of the model's own making."""
        return ReplayCache(self._replayed, rows)

    def tap_width(self, taps: Sequence[Tap]) -> int:
        """Return F, the width of the concatenated features."""
        return len(taps) * self.info.hidden_size

    @torch.inference_mode()
    def forward(
        self,
        token_BN: Tensor,
        position_BN: Tensor,
        ancestor_BNN: Tensor,
        cache: SlotCache | ReplayCache,
        *,
        taps: Sequence[Tap] = (),
        logits_to_keep: int | Tensor = 0,
        before_BM: Tensor | None = None,
    ) -> Output:
        """Run N new tokens of each row; node n sees the row's committed tokens and the nodes m with ancestor_BNN[b, n, m].

        Keys and values land in the slots after each row's committed ones; nothing is committed. `logits_to_keep` n > 0
        gives the logits of the last n tokens only, a tensor those of the tokens it names. `before_BM` are the positions of
        M tokens that ran since and are not committed either: the first M columns of `ancestor_BNN` are theirs.
        """
        if isinstance(cache, ReplayCache):
            assert before_BM is None, "a chain is verified whole"
            return Output(*cache.forward(token_BN, logits_to_keep, taps))

        def plain() -> tuple[Tensor, ...]:
            return self._plain_forward(token_BN, position_BN, ancestor_BNN, cache, taps, logits_to_keep, before_BM)

        out = None
        # Who wants all logits verifies or drafts; who wants few reads a prompt, which is not compiled.
        if self.compiled is not None and isinstance(logits_to_keep, int) and not logits_to_keep:
            out = self.compiled.forward(token_BN, position_BN, ancestor_BNN, cache, taps, before_BM, plain)
        logits, *feature = plain() if out is None else out
        return Output(logits, feature[0] if feature else None)

    def _plain_forward(
        self,
        token_BN: Tensor,
        position_BN: Tensor,
        ancestor_BNN: Tensor,
        cache: SlotCache,
        taps: Sequence[Tap],
        logits_to_keep: int | Tensor,
        before_BM: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return logits and, where there are taps, features."""
        before_BM = position_BN[:, :0] if before_BM is None else before_BM
        cache.slots.place(token_BN.shape[1], token_BN.device, offset=before_BM.shape[1])
        relative_BS = cache.slots.relative(token_BN.device)
        mask = self.masks(torch.cat([before_BM, position_BN], 1), position_BN, ancestor_BNN, relative_BS)
        if taps and isinstance(logits_to_keep, int) and logits_to_keep:
            # Told a number, some models run their upper layers on the last tokens only; taps need all tokens.
            size = token_BN.shape[1]
            logits_to_keep = torch.arange(max(0, size - logits_to_keep), size, device=token_BN.device)
        room = wide_bias(self.text_config, cache.slots.used)
        with self._capture(taps) as captured, use_grouped(self.model), self.packed, room:
            out = self.call(token_BN, position_BN, mask, cache, logits_to_keep)
        return (out.logits, torch.cat(captured, dim=-1)) if taps else (out.logits,)

    def call(
        self,
        token_BN: Tensor,
        position_BN: Tensor,
        mask: Tensor | dict[str, Tensor],
        cache: Cache,
        logits_to_keep: int | Tensor = 0,
    ) -> Any:
        """Return what the model returns for new tokens under an additive mask."""
        return self.model(
            input_ids=token_BN,
            attention_mask=mask,
            position_ids=position_BN.clamp(max=self.max_positions - 1),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self.cache_kwarg: cache},
        )

    def own_pass(
        self, tokens: list[int], start: int = 0, cache: Any = None, keep: int | Tensor = 1
    ) -> tuple[Tensor, Any]:
        """Run the stock model on its own cache, the first token at position `start`; return the logits [1, n, V] of the
        tokens that `keep` names, as a model takes `logits_to_keep`, and the cache, None where the model hands out none."""
        kwargs: dict[str, Any] = {} if cache is None else {self.cache_kwarg: cache}
        if self._takes_positions:
            # As `model.generate` does: some models that are not told begin again at 0 in each pass.
            at_N = torch.arange(start, start + len(tokens), device=self.device)
            kwargs["position_ids"] = at_N[None].clamp(max=self.max_positions - 1)
        ids = torch.tensor([tokens], device=self.device)
        out = self.model(input_ids=ids, use_cache=True, logits_to_keep=keep, **kwargs)
        logits = out.logits[:, -keep:] if isinstance(keep, int) else out.logits  # some give all
        return logits, getattr(out, self.cache_kwarg, None)

    def _replayed(
        self, tokens: list[int], start: int, cache: Any, keep: int, taps: Sequence[Tap]
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Run the model on its own cache as ReplayCache asks: with features, on packed weights."""
        # Told a number, some models run their upper layers on the last tokens only; taps need all tokens.
        wanted = torch.arange(len(tokens) - keep, len(tokens), device=self.device) if taps else keep
        with self._capture(taps) as captured, self.packed:
            logits, cache = self.own_pass(tokens, start, cache, wanted)
        return logits, torch.cat(captured, dim=-1) if taps else None, cache

    @torch.no_grad()
    def features(self, token_BT: Tensor, length_B: Tensor, taps: Sequence[Tap]) -> tuple[Tensor, Tensor]:
        """Return the taps' features [B, T, F] and the feature after the final norm [B, T, D] of right-padded rows.

        Entries on padding are meaningless. Used for training: no cache, no logits.
        """
        with self.packed:
            return self.trained_features(token_BT, length_B, taps)

    def trained_features(self, token_BT: Tensor, length_B: Tensor, taps: Sequence[Tap]) -> tuple[Tensor, Tensor]:
        """Return what `features` does, with gradients to what is trainable in the model: on its plain weights."""
        valid_BT = torch.arange(token_BT.shape[1], device=token_BT.device) < length_B[:, None]
        with self._capture([*taps, "last"]) as captured:
            self.decoder(input_ids=token_BT, attention_mask=valid_BT.long(), use_cache=False)
        return torch.cat(captured[:-1], dim=-1), captured[-1]

    def frozen_on(self, device: torch.device) -> Frozen:
        """Return references for a head on another device, to copies of the embedding and the LM head there."""
        both = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        embedding, out = (copy.deepcopy(module).to(device) for module in both)
        return self._references(embedding, out)

    def _references(self, embedding: Any, out: Any) -> Frozen:
        scale, softcap = _logit_transform(self.text_config)
        embed_scale = _body_embed_scale(self.text_config)

        def embed(ids: Tensor) -> Tensor:
            return embedding(ids) * embed_scale if embed_scale != 1.0 else embedding(ids)

        def logits(last: Tensor, rows: Tensor | None = None) -> Tensor:
            if torch.compiler.is_compiling() and rows is None:
                value = out(last) * scale  # packed from outside
            elif rows is None and not (last.requires_grad and torch.is_grad_enabled()):
                with self.packed:
                    value = out(last) * scale
            else:
                at = slice(None) if rows is None else rows
                bias, weight = getattr(out, "bias", None), _dense(out.weight)
                value = nn.functional.linear(last, weight[at], None if bias is None else bias[at]) * scale
            return torch.tanh(value / softcap) * softcap if softcap else value

        return Frozen(
            info=self.info,
            embed=embed,
            logits=logits,
            lm_head_weight=lambda: _dense(out.weight),
            layer_weights=lambda i: _dense_weights(self.layers[i], self.dtype) if self.layers else {},
            final_norm=lambda: getattr(getattr(self.decoder, "norm", None), "weight", None),
        )

    def masks(
        self, new_position_BM: Tensor, position_BN: Tensor, ancestor_BNN: Tensor, relative_BS: Tensor
    ) -> Tensor | dict[str, Tensor]:
        """Return the additive mask [B, 1, N, S], or one per layer type where the model mixes windows.

        `new_position_BM` has the positions of everything that is not committed, the N tokens of this pass last;
        `relative_BS` is as `Slots.relative` gives it.
        """
        M, S, device = new_position_BM.shape[1], relative_BS.shape[1], position_BN.device
        index_BS, new_BS = relative_BS.clamp(0, M - 1), (relative_BS >= 0) & (relative_BS < M)
        seen_BNS = seen_slots(relative_BS, ancestor_BNN)
        lowest = torch.finfo(self.dtype).min
        zero = torch.zeros((), dtype=self.dtype, device=device)

        def additive(layer_type: str, window: int | None) -> Tensor:
            seen = seen_BNS
            if window is not None and window < S:
                # A window counts positions, not slots: a tree node's slot runs ahead of its position.
                key_position_BS = torch.where(
                    new_BS, new_position_BM.gather(1, index_BS), torch.arange(S, device=device)
                )
                key_B1S, query_BN1 = key_position_BS[:, None], position_BN[:, :, None]
                if layer_type == "chunked_attention":
                    seen = seen & (key_B1S // window == query_BN1 // window)
                else:
                    seen = seen & (key_B1S > query_BN1 - window)
            return torch.where(seen, zero, lowest)[:, None]

        if len(self._windows) == 1:
            return additive(*next(iter(self._windows.items())))
        return {layer_type: additive(layer_type, window) for layer_type, window in self._windows.items()}

    @contextmanager
    def _capture(self, taps: Sequence[Tap]) -> Iterator[list[Tensor]]:
        """Inside the block, a forward fills the list with the taps' outputs, in tap order."""
        captured: list[Any] = [None] * len(taps)
        if any(tap != "last" for tap in taps) and not self.layers:
            raise HeadwayError(
                f"no list of {self.info.num_layers} decoder layers in {type(self.model).__name__}; its features cannot be "
                "tapped, use the model without a head"
            )

        def keep(i: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                captured[i] = output if isinstance(output, Tensor) else output[0]

            return hook

        handles = [
            (self.decoder if tap == "last" else self.layers[tap]).register_forward_hook(keep(i))
            for i, tap in enumerate(taps)
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()


def pass_tokens(device: torch.device) -> int:
    """Return how many tokens a pass costs beside its own."""
    return PASS_TOKENS.get(device.type, 256)


@functools.cache
def fast_dtype(device: str, tokens: int = FEW_TOKENS, training: bool = False) -> str:
    """Return the dtype in which passes of that many tokens, or with `training` steps, are fast on the device.

    On a CPU both are timed on one large layer, in well under a second, because no list of instructions tells: without
    bfloat16 instructions one token is cheaper in bfloat16, as fewer bytes are read, but eight cost twice as much as in
    float32; and some processors that have them do a few tokens faster in bfloat16 and a few hundred faster in float32.
    """
    if device.startswith("cuda"):
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    if not device.startswith("cpu"):
        return "float32"
    measure = _step_seconds if training else _layer_seconds
    seconds = {dtype: measure(dtype, tokens) for dtype in (torch.float32, torch.bfloat16)}
    # Of passes a tie goes to bfloat16, which takes half the memory; of steps to float32, whose weights are kept anyway.
    share = 0.9 if training else 1.1
    return "bfloat16" if seconds[torch.bfloat16] < share * seconds[torch.float32] else "float32"


@torch.inference_mode()
def _layer_seconds(dtype: torch.dtype, tokens: int) -> float:
    """Return the least seconds of a few products of `tokens` rows with a layer larger than most caches."""
    layer = nn.Sequential(nn.Linear(1024, 16384, bias=False, dtype=dtype))
    x_MD = torch.randn(tokens, 1024).to(dtype)
    seconds = []
    with Packed(layer):
        for _ in range(5):
            begin = perf_counter()
            layer(x_MD)
            seconds.append(perf_counter() - begin)
    return min(seconds)


def _step_seconds(dtype: torch.dtype, tokens: int) -> float:
    """Return the least seconds of a few products of `tokens` rows with a layer, and their gradients, as a step has them."""
    layer = nn.Linear(1024, 4096, bias=False)
    x_MD = torch.randn(tokens, 1024, requires_grad=True)
    seconds = []
    for _ in range(4):
        begin = perf_counter()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = layer(x_MD)
        out.backward(torch.ones_like(out))
        seconds.append(perf_counter() - begin)
    return min(seconds)


def load_tokenizer(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target without loading the model. Raises HeadwayError when there is none."""
    source, extra = _source(str(name))
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code, **extra)
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError, StrictDataclassError) as e:
        first = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise HeadwayError(
            f"cannot load a tokenizer from {str(name)!r}: {first} Give a hub id, a model folder or a .gguf file"
        ) from e


def load_info(name: str | Path, *, revision: str | None = None, adapter: str | Path | None = None) -> TargetInfo:
    """Return what is known of a target from its config and tokenizer, and of an adapter; none of the target's weights are
    read."""
    info = load_config_info(name, revision=revision)
    known = None if adapter is None else read_adapter(adapter)
    return replace(info, num_tokens=len(load_tokenizer(name, revision=revision)), adapter=known)


def check_merge(adapter: str | Path | None, merge: bool) -> None:
    """Raise HeadwayError where an adapter is to be merged and there is none."""
    if merge and adapter is None:
        raise HeadwayError("--merge-adapter has no adapter to merge; give --target-adapter")


def _quantised_by(name: str, revision: str | None) -> str:
    """Return what an error says of the method that a target's weights are quantised by; nothing where they are not."""
    try:
        fields = getattr(read_model_config(name, revision=revision), "quantization_config", None)
    except HeadwayError:
        return ""
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if method is None:
        return ""
    needs = LIBRARIES.get(method, f"what transformers needs for {method}")
    return f"; its weights are quantised by {method}, see that {needs} is installed and works here"


def _is_adapter(name: str, base: str) -> HeadwayError:
    return HeadwayError(
        f"{name!r} is a PEFT adapter, no target; give its base: --target {base or 'BASE'} --target-adapter {name}"
    )


def _say_adapter(name: str, adapter: AdapterInfo) -> None:
    if adapter.base and Path(adapter.base.rstrip("/")).name.lower() != Path(name.rstrip("/")).name.lower():
        print(
            f"headway: adapter {adapter.name} says it was made for {adapter.base}, it is put on {name}", file=sys.stderr
        )
    folder = Path(adapter.name).expanduser()
    if (folder / "chat_template.jinja").is_file():
        print(
            f"headway: adapter {adapter.name} brings a chat template, which is not used unless it is given: --chat-template "
            f"{folder / 'chat_template.jinja'}",
            file=sys.stderr,
        )


def load_config_info(name: str | Path, *, revision: str | None = None) -> TargetInfo:
    """Return what is known of a target from its config alone: `num_tokens` is the size of its vocabulary."""
    config = read_model_config(name, revision=revision).get_text_config()
    try:
        return TargetInfo(
            name=str(name),
            revision=getattr(config, "_commit_hash", None),
            model_type=config.model_type,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            num_tokens=config.vocab_size,
            num_layers=config.num_hidden_layers,
            text_config=_plain_config(config),
        )
    except AttributeError as e:
        raise HeadwayError(f"cannot read a model config from {str(name)!r}: {e}") from e


def read_model_config(name: str | Path, *, revision: str | None = None) -> Any:
    """Return the transformers config of a target. Raises HeadwayError when there is none."""
    source, extra = _source(str(name))
    try:
        return AutoConfig.from_pretrained(source, revision=revision, **extra)
    except (
        OSError,
        ValueError,
        ImportError,
        KeyError,
        TypeError,
        AttributeError,
        StrictDataclassError,
        struct.error,
    ) as e:
        first = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise HeadwayError(f"cannot read a model config from {str(name)!r}: {first}") from e


def load_end_ids(
    name: str | Path, tokenizer: PreTrainedTokenizerBase, *, revision: str | None = None
) -> tuple[int, ...]:
    """Return the ids that end an answer, as `Target.eos_ids` has them; no weights are read."""
    source, extra = _source(str(name))
    owners: list[Any] = []
    if not extra:
        with suppress(OSError, ValueError):  # many targets have no generation config
            owners.append(GenerationConfig.from_pretrained(source, revision=revision or "main"))
    with suppress(OSError, ValueError):
        owners.append(AutoConfig.from_pretrained(source, revision=revision, **extra).get_text_config())
    return _end_ids([*owners, tokenizer])


def _end_ids(owners: Sequence[Any]) -> tuple[int, ...]:
    """Return the end ids of the first that has some."""
    for owner in owners:
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return tuple(ids) if isinstance(ids, list | tuple) else (int(ids),)
    return ()


def usable_positions(text_config: dict[str, Any]) -> int:
    """Return the longest context of a target: what it is configured for, but with rotary angles that change with the
    longest position of a batch (longrope, dynamic NTK), what it has before they change."""
    # MPT's config has `max_seq_len` alone, the size of its table of biases.
    configured = int(text_config.get("max_position_embeddings") or text_config.get("max_seq_len") or 2**31)
    rope = text_config.get("rope_parameters") or text_config.get("rope_scaling") or {}
    kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict)]  # one, or one for each layer type
    if not any(kind.get("rope_type", kind.get("type")) in ("longrope", "dynamic") for kind in kinds):
        return configured
    name = "original_max_position_embeddings"
    sizes = [size for owner in (text_config, *kinds) if isinstance(size := owner.get(name), int)]
    return min([configured, *sizes])


def _attention_kinds(config: Any) -> set[str]:
    """Return the words of a config's `attention_layers`, the way in which GPT-Neo says what its layers are."""
    return {kind for kind in getattr(config, "attention_layers", None) or () if isinstance(kind, str)}


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """Return what from_pretrained takes for a hub id, folder or .gguf file, after checking that a path exists."""
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise HeadwayError(f"no file {name!r}; give an existing .gguf file, a model folder or a hub id")
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if (path / ADAPTER_CONFIG).is_file():
            raise _is_adapter(name, "")
        if not (path / "config.json").is_file():
            raise HeadwayError(f"folder {name!r} has no config.json; give the folder of a transformers model")
        return str(path), {}
    if name.count("/") > 1 or name.startswith((".", "~", "/")):
        raise HeadwayError(f"no folder {name!r}; give an existing model folder, a .gguf file or a hub id (owner/name)")
    return name, {}


def _dense(weight: Tensor) -> Tensor:
    """Return a weight as plain numbers; a quantised one that can say what it stands for (torchao's) is dequantised."""
    return weight.detach().dequantize() if _can_dequantise(weight) else weight  # type: ignore[no-untyped-call]


def _can_dequantise(weight: Tensor) -> bool:
    return type(weight.data) is not Tensor and hasattr(weight, "dequantize")


def _dense_weights(layer: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights of a layer by name; those whose numbers are codes as what they stand for, or not at all."""
    named = dense_weights(layer) if adapted(layer) else dict(layer.named_parameters())
    dense = {name: _dense(weight) for name, weight in named.items()}
    weights = {name: weight for name, weight in dense.items() if weight.is_floating_point()}
    if adapted(layer):
        return weights
    for name, module in layer.named_modules():
        if _keeps_codes(module) and (weight := _stands_for(module, dtype)) is not None:
            weights[f"{name}.weight"] = weight
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                weights[f"{name}.bias"] = bias.to(dtype)
    return weights


def _keeps_codes(module: nn.Module) -> bool:
    """Return whether a linear layer has codes in place of a weight, as those of bitsandbytes and GPTQModel have."""
    weight = getattr(module, "weight", None)
    linear = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    readable = isinstance(weight, Tensor) and (weight.is_floating_point() or _can_dequantise(weight))
    return linear and not readable and not next(module.children(), None)


@torch.no_grad()
def _stands_for(module: nn.Module, dtype: torch.dtype, inputs: int | None = None) -> Tensor | None:
    """Return the weight [out, in] of a linear layer that keeps codes, its first `inputs` columns: what it makes of unit
    vectors. Every library lays out its codes in ways of its own, which change with device, dtype and the first pass; what
    its layers compute does not. None where a layer does not run."""
    size = int(module.in_features)  # type: ignore[arg-type]
    devices = [t.device for t in itertools.chain(module.parameters(), module.buffers())]
    x_MD = torch.zeros(1 + (inputs or size), size, dtype=dtype, device=devices[0] if devices else None)
    x_MD[1:].fill_diagonal_(1)
    try:
        nothing, *_ = out_MO = module(x_MD)  # nothing in, the bias out
    except Exception:  # noqa: BLE001 - a foreign layer that cannot be asked
        return None
    return (out_MO[1:] - nothing).T.contiguous()


def _unpack(model: PreTrainedModel) -> None:
    """Have a model that unpacks its weights in its first pass (compressed-tensors' do) make that pass, so that they are what
    they will be whenever they are read."""
    if any(isinstance(m, nn.Linear) and not hasattr(m, "weight") for m in model.modules()):
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=model.device), use_cache=False)


def _find_layers(decoders: tuple[nn.Module, ...], num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that runs the decoder layers, and the layers; the first and an empty list where none has such a list.

    `decoders` are the modules they may be in, likeliest first.
    """
    for decoder in decoders:
        for owner in (decoder, *decoder.children()):
            for child in owner.children():
                if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                    return owner, child
    return decoders[0], nn.ModuleList()


def _plain_config(config: Any) -> dict[str, Any]:
    """Return the config as JSON-ready values; what is not plain data is left out."""
    import json

    def plain(value: Any) -> bool:
        try:
            json.dumps(value)
        except TypeError:
            return False
        return True

    values = {k: v for k, v in config.to_dict().items() if plain(v)}
    # Some configs hold a field under a name of their own (n_head); the common name is what heads look for.
    aliases = {k: getattr(config, v) for k, v in getattr(config, "attribute_map", {}).items() if v in values}
    return values | aliases


def _windows(config: Any) -> dict[str, int | None]:
    """Return the attention window of each layer type; one entry when the whole model shares one mask."""
    types = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    # A `layer_types` of one kind is still passed as a single mask: models that mix kinds take a dict, all take a tensor.
    if len(types) > 1:
        sizes = {"sliding_attention": window, "chunked_attention": getattr(config, "attention_chunk_size", None)}
        return {t: sizes.get(t) for t in sorted(types)}
    if types == {"chunked_attention"}:
        return {"chunked_attention": config.attention_chunk_size}
    if types == {"full_attention"} or getattr(config, "use_sliding_window", True) is False:
        return {"all": None}
    return {"all": window}


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """Return (scale, softcap) that the model applies to lm_head's output."""
    scale = 1.0
    if getattr(config, "logits_scaling", None):
        scale = 1.0 / config.logits_scaling
    elif getattr(config, "logit_scale", None):
        scale = float(config.logit_scale)
    elif getattr(config, "lm_head_multiplier", None):
        scale = float(config.lm_head_multiplier)
    return scale, getattr(config, "final_logit_softcapping", None)


def _body_embed_scale(config: Any) -> float:
    """Return the factor that the model's body, not its embedding module, applies to embeddings."""
    if getattr(config, "embedding_multiplier", None):
        return float(config.embedding_multiplier)
    return 1.0

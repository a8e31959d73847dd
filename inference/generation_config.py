"""Settings from a transformers GenerationConfig: each field means what `model.generate` takes it for, or is refused.

transformers itself fills what is left open, from the model's own generation config and its defaults, and builds the
processors; what it would do without them (beams, several answers, scores) is refused by the field's name.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from headway.heads.common.errors import HeadwayError
from headway.inference.sampling import Processor, Settings
from headway.inference.target import Target

NATIVE = {
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "eos_token_id", "stop_strings"),
}
"""Fields that Settings have too."""
PROCESSORS: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (),
    "begin_suppress_tokens": (),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "no_repeat_ngram_size": (0,),
    "remove_invalid_values": (False,),
    "renormalize_logits": (False,),
    "sequence_bias": (),
    "suppress_tokens": (),
}
"""Fields that become transformers' processors, and the values besides None that do nothing."""
SAMPLERS: dict[str, tuple[Any, ...]] = {
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
}
"""The same for those that count only where tokens are sampled."""
IDLE = {
    *("bos_token_id", "decoder_start_token_id", "pad_token_id", "transformers_version"),
    *("compile_config", "disable_compile", "max_cache_len", "prefill_chunk_size", "use_cache"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "target_lookbehind"),
}
"""Fields that change no token of one greedy or sampled answer: ids of no use here, how to compute, how an assistant that is
asked for elsewhere drafts."""
REMEDIES = {
    "assistant_early_exit": "the head drafts",
    "cache_implementation": "the target's cache is headway's own",
    "guidance_scale": "its second pass needs transformers' own loop",
    "max_time": "close the stream when its time is over",
    "num_beams": "beams are not decoded with a head",
    "num_return_sequences": "give the prompt several times",
    "output_attentions": "read them from a forward of the model",
    "output_hidden_states": "read them from a forward of the model",
    "output_logits": "read them from a forward of the model",
    "output_scores": "read them from a forward of the model",
    "penalty_alpha": "contrastive search needs transformers' own loop",
    "prompt_lookup_num_tokens": "the head drafts",
    "return_dict_in_generate": "the answer is a Result as it is",
}


def settings_of(config: GenerationConfig, target: Target, prompt_ids: list[int]) -> Settings:
    """Return the settings under which `prompt_ids` are answered as `target.model.generate` would under `config`.

    Greedy answers are transformers' own in float32; sampled ones follow its law, their seed drawn from torch's generator.
    Settings made with processors belong to this prompt: some count from its length.

    Raises HeadwayError that names a field which is set and not supported.
    """
    _refuse(config, target)
    prepared, processors = _prepared(config, target, prompt_ids)
    shared: dict[str, Any] = {
        "max_new_tokens": prepared.max_length - len(prompt_ids),
        "seed": int(torch.randint(2**31, ())),
        "eos_ids": eos_ids(prepared.eos_token_id),
        "stop": _strings(prepared.stop_strings),
    }
    if shared["max_new_tokens"] < 1:
        raise HeadwayError(
            f"max_length is {prepared.max_length}, the prompt has {len(prompt_ids)} tokens; set max_new_tokens, or a "
            "max_length above that"
        )
    needed = PROCESSORS | SAMPLERS if prepared.do_sample else PROCESSORS
    if any(_is_set(getattr(prepared, name, None), needed[name]) for name in needed):
        # All of them, in transformers' order: a bias comes before the penalty, the typical set after top-p.
        return Settings(
            temperature=1.0 if prepared.do_sample else 0.0, processors=(_as_processor(processors),), **shared
        )
    if prepared.do_sample:
        shared |= {"temperature": prepared.temperature, "top_k": prepared.top_k or 0, "min_p": prepared.min_p or 0.0}
        shared["top_p"] = 1.0 if prepared.top_p is None else prepared.top_p
    minimum = max(prepared.min_new_tokens or 0, (prepared.min_length or 0) - len(prompt_ids))
    return Settings(
        repetition_penalty=prepared.repetition_penalty or 1.0,
        min_new_tokens=min(minimum, shared["max_new_tokens"]),
        **shared,
    )


def _refuse(config: GenerationConfig, target: Target) -> None:
    """Raise HeadwayError for a field that is set, by the user or in the model's generation config, and not supported."""
    defaults = GenerationConfig._get_default_generation_params()
    own, known = getattr(target.model, "generation_config", None), vars(GenerationConfig())
    for name, value in vars(config).items():
        if name.startswith("_") or name in NATIVE or name in PROCESSORS or name in SAMPLERS or name in IDLE:
            continue
        if name not in known and value == getattr(own, name, None):
            continue  # what a model's config holds beyond transformers' fields is for code of its own
        value = getattr(own, name, None) if value is None else value
        if _is_set(value, (defaults.get(name), False)):
            remedy = REMEDIES.get(name, "leave it out, or use model.generate")
            raise HeadwayError(f"{name} is {value!r}; it is not supported: {remedy}")


def _is_set(value: Any, idle: tuple[Any, ...]) -> bool:
    return value is not None and value not in idle


def _prepared(
    config: GenerationConfig, target: Target, prompt_ids: list[int]
) -> tuple[GenerationConfig, LogitsProcessorList]:
    """Return the config with nothing left open, and the processors, as `model.generate` hands them to a decoding loop."""
    config = deepcopy(config)
    stop, config.stop_strings = config.stop_strings, None  # criteria that would want the tokenizer
    taken: list[tuple[GenerationConfig, LogitsProcessorList]] = []

    def take(model: Any, input_ids: Tensor, **given: Any) -> Tensor:
        taken.append((given["generation_config"], given["logits_processor"]))
        return input_ids

    ids = torch.tensor([prompt_ids], device=target.device)
    extra = {} if target.tokenizer is None else {"tokenizer": target.tokenizer}
    try:
        target.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), generation_config=config, custom_generate=take, **extra
        )
    except (ValueError, TypeError) as error:
        raise HeadwayError(f"transformers refuses the generation config: {error}") from error
    ((prepared, processors),) = taken
    if stop is not None:
        prepared.stop_strings = stop
    return prepared, processors


def _as_processor(processors: LogitsProcessorList) -> Processor:
    def process(ids: Tensor, scores: Tensor) -> Tensor:
        return processors(ids, scores)  # type: ignore[arg-type]  # declared LongTensor

    return process


def eos_ids(eos: int | list[int] | None) -> tuple[int, ...]:
    """Return the end ids of a config's `eos_token_id`: one, several or none."""
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)


def _strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)

"""Headway as the decoding loop of `model.generate`, by transformers' own `custom_generate`.

transformers prepares the inputs, the processors and the stopping criteria from the generation config; the loop applies them
at each node of the tree and after each token, so every setting that is one of these means what it means there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Head
from headway.inference.drafter import Drafter
from headway.inference.generate import Request, generate
from headway.inference.generation_config import eos_ids
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import Policy

REFUSED = {
    "return_dict_in_generate": "read scores and hidden states from a forward of the model",
    "prompt_lookup_num_tokens": "the head drafts",
    "dola_layers": "its contrast of layers needs transformers' own loop",
    "penalty_alpha": "contrastive search needs transformers' own loop",
}

READ = {"attention_mask", "position_ids", "logits_to_keep", "use_cache"}
"""Arguments of a model that the loop reads or that change no answer, beside its cache and `inputs_embeds`."""


def headway_generate(
    target: Target, head: Head | Drafter | None = None, policy: Policy | None = None, streamer: Any = None
) -> Callable[..., Tensor]:
    """Return what `target.model.generate(**inputs, custom_generate=...)` takes; without a head it decodes plainly.

    The call returns ids [B, T] as transformers does: the padded prompts, the answers, padding. Greedy answers are
    transformers' own in float32; sampled ones follow its law, their seed drawn from torch's generator. `streamer` (a
    TextStreamer, say; one prompt at a time) is given here, as transformers hands none on. It hands on no tokenizer either:
    stop strings go into `stopping_criteria=[StopStringCriteria(tokenizer, strings)]`. A processor that keeps a state of its
    own takes one prompt at a time.

    Raises HeadwayError for another model, beams, what is named in REFUSED, and arguments of the model that the answers would
    be made without: images, token types, positions that are not 0, 1, ... after the padding.
    """

    def decode(
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Tensor:
        _check(target, model, input_ids, generation_config, model_kwargs, streamer)
        B, T = input_ids.shape
        mask_BT = model_kwargs.get("attention_mask")
        padding_B = [0] * B if mask_BT is None else (T - mask_BT.sum(1)).tolist()
        config, seed = generation_config, int(torch.randint(2**31, ()))
        requests = []
        for b, (ids, padding) in enumerate(zip(input_ids.tolist(), padding_B, strict=True)):
            if mask_BT is not None and not bool(mask_BT[b, padding:].all()):
                raise HeadwayError(f"row {b} is not padded on its left; set tokenizer.padding_side = 'left'")
            _check_positions(model_kwargs.get("position_ids"), b, padding)
            front = input_ids[b : b + 1, :padding]
            settings = Settings(
                max_new_tokens=config.max_length - T,
                temperature=1.0 if config.do_sample else 0.0,  # its temperature is among the processors
                seed=seed,
                eos_ids=eos_ids(config.eos_token_id),
                processors=(_in_batch(b, B, front, logits_processor),),
            )
            requests.append(Request(ids[padding:], settings, id=b, key=b, ends=_ends(front, stopping_criteria)))
        if streamer is not None:
            streamer.put(input_ids.cpu())
        show = (lambda request, tokens: streamer.put(torch.tensor(tokens))) if streamer is not None else None
        try:
            results = generate(target, requests, head=head, policy=policy, batch_size=B, on_tokens=show)
            answers = {result.id: result.token_ids for result in results}
        finally:
            if streamer is not None:
                streamer.end()  # after an error too: another thread may wait for it
        width = max(map(len, answers.values()))
        padded = [answers[b] + [_pad(config)] * (width - len(answers[b])) for b in range(B)]
        return torch.cat([input_ids, torch.tensor(padded, device=input_ids.device)], dim=1)

    return decode


def _in_batch(b: int, rows: int, front: Tensor, processors: LogitsProcessorList) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the processors as they see row b of a padded batch: with its padding in front, and at its place, since some
    know each row by its number. The other rows are copies of it."""

    def process(ids: Tensor, scores: Tensor) -> Tensor:
        padded = torch.cat([front, ids], dim=1).repeat(rows, 1)
        out: Tensor = processors(padded, scores.repeat(rows, 1))  # type: ignore[arg-type]  # declared LongTensor
        return out[b : b + 1]

    return process


def _ends(front: Tensor, criteria: StoppingCriteriaList) -> Callable[[list[int]], bool]:
    def ends(history: list[int]) -> bool:
        ids = torch.cat([front, torch.tensor([history], device=front.device)], dim=1)
        return bool(criteria(ids, None)[0])

    return ends


def _check(
    target: Target,
    model: Any,
    input_ids: Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any,
) -> None:
    if model is not target.model:
        raise HeadwayError("headway_generate was made for another model; call target.model.generate")
    if (config.num_beams or 1) > 1:
        raise HeadwayError(f"num_beams is {config.num_beams}; beams are not decoded with a head, use num_beams=1")
    for name, remedy in REFUSED.items():
        if getattr(config, name, None):
            raise HeadwayError(f"{name} is {getattr(config, name)!r}; it is not supported: {remedy}, leave it out")
    if model_kwargs.get("inputs_embeds") is not None:
        raise HeadwayError("inputs_embeds is not supported; give input_ids")
    more = [n for n, v in model_kwargs.items() if v is not None and n not in READ | {target.cache_kwarg}]
    if more:
        raise HeadwayError(f"{more[0]} is given, which the answers would be made without; leave it out")
    cache = model_kwargs.get(target.cache_kwarg)
    if cache is not None and cache.get_seq_length():
        raise HeadwayError("a cache that holds tokens is not supported; give the whole prompt and no cache")
    if streamer is not None and len(input_ids) > 1:
        raise HeadwayError(f"a streamer shows one answer, {len(input_ids)} prompts were given; give one")


def _check_positions(position_ids: Tensor | None, b: int, padding: int) -> None:
    """Raise HeadwayError unless row b has the positions that transformers gives it, after its padding."""
    if position_ids is None:
        return
    row = position_ids[..., b if position_ids.shape[-2] > 1 else 0, padding:]
    if not bool((row == torch.arange(row.shape[-1], device=row.device)).all()):
        raise HeadwayError(
            f"position_ids of row {b} are {row.tolist()}; a prompt's positions are 0, 1, ... after its padding, leave them out"
        )


def _pad(config: GenerationConfig) -> int:
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    return next(iter(eos_ids(config.eos_token_id)), 0)

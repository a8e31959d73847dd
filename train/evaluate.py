"""How good a head is: loss and agreement on held-out rows, and the length the real decoder accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from headway.heads.common.protocol import Batch, Head
from headway.train.batches import Row

if TYPE_CHECKING:
    from headway.inference.target import Target
    from headway.inference.tree import Policy
    from headway.inference.unfinished import Unfinished
    from headway.train.joint import Joint


@torch.no_grad()
def evaluate_agreement(head: Head | Joint, batches: Iterable[Batch]) -> dict[str, Any]:
    """Return held-out `loss` (a supervised token's, averaged over all), `loss_S` and `agreement_S` per step, `tokens`, and
    what figures the loss reports beside.

    Every mean is over supervised tokens, not over batches.
    """
    loss = tokens = 0.0
    loss_S = agreement_S = count_S = torch.zeros(1, dtype=torch.float64)
    figures: dict[str, float] = {}
    for batch in batches:
        report = head.loss(batch)
        count = report.count_S.double().cpu()
        tokens += float(count[0])
        loss += float(report.loss) * float(count[0])
        loss_S = loss_S + report.loss_S.double().cpu() * count
        agreement_S = agreement_S + report.agreement_S.double().cpu() * count
        count_S = count_S + count
        for name, mean in report.figures.items():
            figures[name] = figures.get(name, 0.0) + float(mean) * float(count[0])
    share = 1.0 / count_S.clamp_min(1)
    return {
        "loss": loss / max(1.0, tokens),
        "loss_S": (loss_S * share).tolist(),
        "agreement_S": (agreement_S * share).tolist(),
        "tokens": int(tokens),
        **{name: total / max(1.0, tokens) for name, total in figures.items()},
    }


def evaluate_accepted_length(
    target: Target,
    head: Head,
    policy: Policy | None,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int = 64,
    batch_size: int = 1,
    stop: Callable[[], bool] = lambda: False,
    unfinished: Unfinished | None = None,
    part: str = "",
) -> dict[str, Any]:
    """Return `accepted_length` (emitted tokens per target pass), `tokens`, `rounds` and `prompts` of greedy answers.

    The mean is over the target passes that each answer took part in, so long answers count for more. `batch_size` answers
    run together, which is sooner done. `stop` is asked between answers. Prompts that `unfinished` holds, under `part` and
    their number, are not answered again.
    """
    from headway.inference.generate import Request, generate
    from headway.inference.sampling import Settings
    from headway.inference.unfinished import kept

    settings = Settings(max_new_tokens=max_new_tokens)
    numbers = [f"{part}{i}" for i in range(len(prompts))]
    done, keep = kept(unfinished)
    known = {n: done[n] for n in numbers if n in done}
    requests = [Request(ids, settings, id=n) for n, ids in zip(numbers, prompts, strict=True) if n not in known]
    training = head.training
    head.eval()
    for result in generate(target, requests, head=head, policy=policy, batch_size=batch_size):
        known[result.id] = sum(result.accepted_per_round), result.rounds
        keep(result.id, known[result.id])
        if stop():
            break
    head.train(training)
    emitted, rounds = (sum(counts[i] for counts in known.values()) for i in (0, 1))
    length = emitted / rounds if rounds else 1.0
    return {"accepted_length": length, "tokens": emitted, "rounds": rounds, "prompts": len(known)}


def choose_prompts(rows: Sequence[Row], num_prompts: int, room: int) -> list[list[int]]:
    """Return the prompts of the first rows that have one of at most `room` tokens."""
    return [row.prompt for row in rows if 0 < len(row.prompt) <= room][:num_prompts]

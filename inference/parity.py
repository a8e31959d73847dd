"""Whether an engine would draft as the head does: logits and accepted length of both, on what the target itself writes.

The engine's side is `heads.formats.reference`, which reads the exported folder by itself. Both sides get the same
features; each those of its own taps.

Letters: T positions, F tap width, V vocabulary of the target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.heads.common.errors import HeadwayError
from headway.heads.common.protocol import Context, Frontier, Head, Tap
from headway.heads.formats.layout import TargetWeights
from headway.heads.formats.reference import Reading
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target

TOLERANCE = 2e-4
"""Largest difference of two logits, as a share of their range, that float32 explains."""
CLEARLY = 1.15
"""Accepted length of another reading, over that of the folder's own, at which the folder is taken for wrong."""

Draft = Callable[[int, int, list[int] | None], list[Tensor]]
"""(anchor, depth, forced tokens) -> logits [V] of each step"""

Text = tuple[list[int], int]
"""Tokens, and how many of them are the prompt's; the target wrote the rest."""


@dataclass
class Answer:
    """A prompt and what the target wrote after it."""

    token_T: Tensor
    prompt: int
    """Tokens of the prompt."""
    feature: dict[Tap, Tensor]
    """[T, D] of each tap."""

    def taps(self, taps: Sequence[Tap]) -> Tensor:
        """Return [T, F] of some taps."""
        return torch.cat([self.feature[tap] for tap in taps], -1)


@dataclass
class Parity:
    """What the comparison found."""

    depth: int
    """Tokens of a draft."""
    tokens: int = 0
    """Tokens that the target wrote."""
    accepted_engine: float = 1.0
    accepted_head: float | None = None
    """Accepted length; None without a head to compare with."""
    difference: float | None = None
    """Largest difference of two logits, as a share of their range."""
    faults: list[str] = field(default_factory=list)


def weights_of(target: Target) -> TargetWeights:
    """Return the target's embedding and LM head as its files hold them."""
    embedding = target.model.get_input_embeddings().weight
    return TargetWeights(embedding.detach(), target.frozen.lm_head_weight().detach())


def write(target: Target, prompts: Sequence[list[int]], max_new_tokens: int = 48) -> list[Text]:
    """Return what the target writes greedily after each prompt, each prompt with what follows it."""
    requests = [Request(ids, Settings(max_new_tokens=max_new_tokens), i) for i, ids in enumerate(prompts)]
    written = {result.id: result.token_ids for result in generate(target, requests)}
    return [([*ids, *written[i]], len(ids)) for i, ids in enumerate(prompts)]


@torch.no_grad()
def answers(target: Target, texts: Sequence[Text], taps: Sequence[Tap]) -> list[Answer]:
    """Return texts with the target's features."""
    found = []
    for tokens, prompt in texts:
        token_T = torch.tensor(tokens)
        length_B = torch.tensor([len(tokens)], device=target.device)
        tap_BTF, _ = target.features(token_T[None].to(target.device), length_B, list(taps))
        parts = tap_BTF[0].float().cpu().split(target.info.hidden_size, -1)
        found.append(Answer(token_T, prompt, dict(zip(taps, parts, strict=True))))
    return found


def accepted_per_round(answer: Answer, draft: Draft, depth: int) -> list[int]:
    """Return the tokens that each round of chain drafting emits, were the answer decoded with it."""
    tokens, p, counts = answer.token_T.tolist(), answer.prompt - 1, []
    while p + 2 < len(tokens):
        left = tokens[p + 2 :]
        drafted = [int(logits.argmax()) for logits in draft(p, min(depth, len(left)), None)]
        wrong = next((i for i, token in enumerate(drafted) if token != left[i]), len(drafted))
        counts.append(min(wrong + 1, len(left)))
        p += wrong + 1
    return counts


@torch.no_grad()
def head_draft(
    head: Head, feature_TF: Tensor, token_T: Tensor, p: int, depth: int, forced: list[int] | None
) -> list[Tensor]:
    """Return the head's logits over the target's words after anchor p, as Reading.draft."""
    device = head.frozen.lm_head_weight().device
    context = Context(
        tap_BTF=feature_TF[None, : p + 1].to(device),
        next_BT=token_T[None, 1 : p + 2].to(device),
        position_BT=torch.arange(p + 1, device=device)[None],
        count_B=[p + 1],
    )
    state = head.start(context, None, 1)
    token, zero = context.next_BT[:, -1:], torch.zeros(1, 1, dtype=torch.long, device=device)
    drafted: list[Tensor] = []
    for d in range(depth):
        logits_BNV, state = head.step(state, Frontier(token, zero, d))
        logits = logits_BNV[0, 0].float().cpu()
        if head.draft_vocab is not None:
            wide = torch.full((head.config.vocab_size,), -torch.inf)
            wide[head.draft_vocab.cpu()] = logits
            logits = wide
        drafted.append(logits)
        token = torch.tensor([[int(logits.argmax()) if forced is None else forced[d]]], device=device)
    return drafted


@torch.no_grad()
def compare(
    target: Target,
    reading: Reading,
    head: Head | None,
    texts: Sequence[Text],
    depth: int = 3,
) -> Parity:
    """Return how the engine's reading of a folder drafts beside the head, on what the target wrote (see `write`).

    Without a head, the reading is compared with what else the folder might have been meant to be (see Reading.others).
    """
    if head is not None and reading.depth is not None and reading.depth != head.max_depth:
        return Parity(0, faults=[f"the engine drafts {reading.depth} tokens at most, the head {head.max_depth}"])
    most = reading.depth or (head.max_depth if head is not None else None)
    if most is not None and (reading.asked or 0) > most:
        return Parity(
            0, faults=[f"config.json lets a server draft {reading.asked} tokens, the head was trained on {most}"]
        )
    depth = min(depth, most or depth)
    every = max(depth, most or depth)  # beyond the chain's depth too, where a head has a last one
    if all(len(tokens) <= prompt + every for tokens, prompt in texts):
        raise HeadwayError(
            f"the target wrote no more than {max((len(t) - p for t, p in texts), default=0)} tokens after a prompt, the comparison "
            f"needs {every + 1}; give other prompts, or more --max-new-tokens"
        )
    others = reading.others(target.info.num_layers) if head is None else []
    tapped = [reading.taps, *(other.taps for _, other in others), () if head is None else head.config.taps]
    taps = dict.fromkeys(tap for some in tapped for tap in some)
    told = answers(target, texts, list(taps))
    parity = Parity(depth, sum(len(tokens) - prompt for tokens, prompt in texts))

    def engine(answer: Answer, reading: Reading) -> Draft:
        feature_TF = answer.taps(reading.taps)
        return lambda p, n, forced: reading.draft(feature_TF, answer.token_T, p, n, forced)

    rounds = [accepted_per_round(answer, engine(answer, reading), depth) for answer in told]
    parity.accepted_engine = _mean(rounds)
    if head is None:
        for what, other in others:
            better = _mean([accepted_per_round(answer, engine(answer, other), depth) for answer in told])
            if better > CLEARLY * parity.accepted_engine:
                parity.faults.append(
                    f"accepted length is {parity.accepted_engine:.2f} as the folder is read, {better:.2f} with {what}: config.json "
                    "says otherwise than the head was trained"
                )
        if parity.accepted_engine == 1.0 and not parity.faults:
            parity.faults.append("no draft was accepted")
        return parity
    frozen_float = head.float() if next(head.parameters()).dtype != torch.float32 else head

    def ours(answer: Answer) -> Draft:
        feature_TF = answer.taps(head.config.taps)
        return lambda p, n, forced: head_draft(frozen_float, feature_TF, answer.token_T, p, n, forced)

    own = [accepted_per_round(answer, ours(answer), depth) for answer in told]
    parity.accepted_head = _mean(own)
    long = [a for a in told if len(a.token_T) > a.prompt + every]
    parity.difference = max((_difference(a, engine(a, reading), ours(a), every) for a in long), default=1.0)
    if parity.difference > TOLERANCE:
        parity.faults.append(
            f"logits differ by {parity.difference:.2g} of their range; float32 explains {TOLERANCE:.0e}"
        )
    if own != rounds:
        parity.faults.append(
            f"accepted length is {parity.accepted_engine:.3f} as the engine reads the folder, {parity.accepted_head:.3f} with the "
            "head"
        )
    return parity


def _mean(rounds: list[list[int]]) -> float:
    counts = [count for some in rounds for count in some]
    return sum(counts) / len(counts) if counts else 1.0


def _difference(answer: Answer, engine: Draft, ours: Draft, depth: int) -> float:
    """Return the largest difference of logits of the words that the head can draft, as a share of their range and up to their
    scale, which drafting does not see; 1 where the engine cannot draft them, or could draft another as the best.

    Both read the answer's own tokens, at up to eight anchors in the answer.
    """
    tokens = answer.token_T.tolist()
    last = len(tokens) - depth - 2
    anchors = range(answer.prompt - 1, last + 1, max(1, (last - answer.prompt + 2) // 8))
    worst = 0.0
    for p in anchors:
        forced = tokens[p + 2 : p + 1 + depth] + [0]
        for theirs, mine in zip(engine(p, depth, forced), ours(p, depth, forced), strict=True):
            words = mine > -torch.inf
            if not torch.isfinite(theirs[words]).all():
                return 1.0
            theirs, mine = theirs / theirs[words].std(), mine / mine[words].std()
            span = float(mine[words].max() - mine[words].min()) or 1.0
            worst = max(worst, float((theirs[words] - mine[words]).abs().max()) / span)
            if float(theirs.max() - theirs[words].max()) > TOLERANCE * span:
                return 1.0
    return worst

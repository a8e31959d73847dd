"""What a head minimises: how far its distribution q is from the target's p, at each label.

Letters: N labels of a chunk, V the head's vocabulary.

p is never made to sum to 1 over a draft vocabulary: the mass that the head cannot reach, 1 - sum(p), is the target's all
the same. Reverse KL, JSD and total variation count it as it stands; forward KL, which would be infinite, is taken over the
mass inside and weighted by it.

Each objective is here twice: `value_and_grad` for the chunked loss, with d/dz written out, and its plain twin `value`,
which autograd differentiates. With q = softmax(z), a derivative d = dL/dq gives dL/dz = q (d - sum(q d)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from headway.heads.common.errors import HeadwayError

LEAST_LOG = -1e4
"""Stands for the log-probability of a word that the target rules out (-inf), which would make 0 x inf of a sum."""


@dataclass(frozen=True)
class Objective:
    """One of OBJECTIVES with its number, and the weight of each draft step."""

    name: str = "kl"
    top_k: int = 64
    """Of `topk`: how many of the target's words are taught."""
    eta: float = 3.0
    """Of `lk`: how fast KL gives way to total variation as acceptance grows."""
    step_weights: tuple[float, ...] = ()
    """Weight of each step's mean; empty leaves it to the family's decay."""

    def weights(self, num_steps: int, decay: float) -> Tensor:
        """Return the weight of each step [S], fp32. Raises HeadwayError when there are not as many as steps."""
        if not self.step_weights:
            return decay ** torch.arange(num_steps)
        self.check_steps(num_steps)
        return torch.tensor(self.step_weights, dtype=torch.float32)

    def check_steps(self, num_steps: int) -> None:
        """Raise HeadwayError unless there is a weight for each of `num_steps` steps, or none at all."""
        if self.step_weights and len(self.step_weights) != num_steps:
            raise HeadwayError(
                f"step_weights has {len(self.step_weights)} numbers, the head has {num_steps} steps; give one for each, "
                "or none for decay^s"
            )


@dataclass
class Teacher:
    """The target's distribution at N labels, over the head's vocabulary."""

    log_NV: Tensor
    """log p, fp32 (or fp64 throughout)."""
    p_NV: Tensor
    """p itself; each row sums to at most 1."""
    label_N: Tensor
    """Index in the head's vocabulary of the target's likeliest word, -1 where the head has no such word."""

    def __post_init__(self) -> None:
        self.mass_N1 = self.p_NV.sum(-1, keepdim=True)

    @cached_property
    def entropy(self) -> Tensor:
        """m times the entropy of p / m [N], where m is the mass inside."""
        within_N = torch.xlogy(self.mass_N1, self.mass_N1)[:, 0]
        return within_N - torch.linalg.vecdot(self.p_NV, self.log_NV)


class Scratch:
    """Matrices as large as a chunk's logits, kept from one chunk to the next. Freed and asked for again each time, several of
    them leave holes in a CPU's heap into which the next do not fit, and memory grows with the number of chunks."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def like(self, name: str, x_NV: Tensor) -> Tensor:
        """Return the matrix of that name with the shape of x, its contents of no meaning."""
        return self.empty(name, x_NV.shape[0], x_NV.shape[1], x_NV)

    def empty(self, name: str, rows: int, columns: int, of: Tensor) -> Tensor:
        """Return the matrix of that name with so many rows and columns, in the dtype of another tensor."""
        kept = self._kept.get(name)
        if kept is None or kept.shape[0] < rows or kept.shape[1] != columns:
            self._kept[name] = kept = of.new_empty(rows, columns)
        return kept[:rows]


def make_teacher(objective: Objective, log_NV: Tensor, label_N: Tensor, scratch: Scratch | None = None) -> Teacher:
    """Return the teacher of an objective from log p; `topk` keeps the likeliest words of the head's vocabulary only.

    log p is overwritten, and p lies in the scratch, if one is given.
    """
    log_NV = log_NV.clamp_(min=LEAST_LOG)
    if objective.name == "topk" and objective.top_k < log_NV.shape[-1]:
        kept = log_NV.topk(objective.top_k, dim=-1)
        log_NV = log_NV.fill_(LEAST_LOG).scatter_(-1, kept.indices, kept.values)
    p_NV = log_NV.exp() if scratch is None else torch.exp(log_NV, out=scratch.like("p", log_NV))
    return Teacher(log_NV, p_NV, label_N)


def value_and_grad(objective: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    """Return the objective at each label [N] and its derivative with respect to the logits z [N, V].

    z may be overwritten; the derivative lies in z or in the scratch, until the next call.
    """
    return _WRITTEN_OUT[objective.name](objective, z_NV, teacher, scratch)


def value(objective: Objective, z_NV: Tensor, teacher: Teacher) -> Tensor:
    """Return the objective at each label [N]: the plain twin of `value_and_grad`, for autograd."""
    return _PLAIN[objective.name](objective, z_NV.log_softmax(-1), teacher)


def _through_softmax(q_NV: Tensor, d_NV: Tensor) -> Tensor:
    """Return dL/dz from dL/dq, which is overwritten."""
    return d_NV.sub_(torch.linalg.vecdot(q_NV, d_NV)[:, None]).mul_(q_NV)


def _log_softmax(z_NV: Tensor, scratch: Scratch) -> Tensor:
    """Return log q in the scratch: in one pass over z, where a logsumexp and what follows are five."""
    return torch.log_softmax(z_NV, -1, out=scratch.like("log_q", z_NV))  # type: ignore[call-overload, no-any-return]


def _kl(_: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    log_q_NV = _log_softmax(z_NV, scratch)
    loss_N = _kl_value(log_q_NV, teacher)
    return loss_N, log_q_NV.exp_().mul_(teacher.mass_N1).sub_(teacher.p_NV)


def _kl_value(log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    # m KL(p/m || q), with m = sum(p)
    return -torch.linalg.vecdot(teacher.p_NV, log_q_NV) - teacher.entropy


def _ce(_: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    inside_N1 = (teacher.label_N >= 0)[:, None].to(z_NV.dtype)
    label_N1 = teacher.label_N.clamp_min(0)[:, None]
    log_q_NV = _log_softmax(z_NV, scratch)
    loss_N = (-log_q_NV.gather(-1, label_N1) * inside_N1)[:, 0]
    return loss_N, log_q_NV.exp_().mul_(inside_N1).scatter_add_(-1, label_N1, -inside_N1)


def _reverse_kl(_: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    log_q_NV = _log_softmax(z_NV, scratch)
    q_NV = torch.exp(log_q_NV, out=scratch.like("q", z_NV))
    d_NV = log_q_NV.sub_(teacher.log_NV)
    loss_N = torch.linalg.vecdot(q_NV, d_NV)
    return loss_N, d_NV.sub_(loss_N[:, None]).mul_(q_NV)


def _jsd(_: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    log_q_NV = _log_softmax(z_NV, scratch)
    q_NV = torch.exp(log_q_NV, out=scratch.like("q", z_NV))
    # log(q / mean) = log 2 - log(1 + p/q); a constant changes no gradient, and without log 2 less is lost to rounding
    gap_NV = log_q_NV.neg_().add_(teacher.log_NV)
    d_NV = _softplus(gap_NV, scratch.like("d", z_NV)).neg_()
    of_q_N = math.log(2) + torch.linalg.vecdot(q_NV, d_NV)
    other_NV = _softplus(gap_NV.neg_(), gap_NV)
    of_p_N = math.log(2) * teacher.mass_N1[:, 0] - torch.linalg.vecdot(teacher.p_NV, other_NV)
    outside_N = (1 - teacher.mass_N1)[:, 0] * math.log(2)  # where q is 0, p log(p / (p/2))
    return 0.5 * (of_q_N + of_p_N + outside_N), _through_softmax(q_NV, d_NV).mul_(0.5)


def _softplus(x: Tensor, out: Tensor) -> Tensor:
    """Return log(1 + e^x), in `out`; beyond 50 it is x to the last digit."""
    return torch.ops.aten.softplus.out(x, 1, 50, out=out)  # type: ignore[no-any-return]


def _tv(_: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    return _tv_of(_log_softmax(z_NV, scratch).exp_(), teacher, scratch)


def _tv_of(q_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    d_NV = scratch.like("d", q_NV)
    common_N = torch.minimum(q_NV, teacher.p_NV, out=d_NV).sum(-1)
    # -1 where q is the lesser and its growth would be shared, 0 where p is; as autograd has it, half at a tie
    torch.sub(q_NV, teacher.p_NV, out=d_NV).sign_().sub_(1).mul_(0.5)
    return 1 - common_N, _through_softmax(q_NV, d_NV)


def _lk(objective: Objective, z_NV: Tensor, teacher: Teacher, scratch: Scratch) -> tuple[Tensor, Tensor]:
    log_q_NV = _log_softmax(z_NV, scratch)
    kl_N = _kl_value(log_q_NV, teacher)
    q_NV = log_q_NV.exp_()
    tv_N, grad_NV = _tv_of(q_NV, teacher, scratch)
    share_N = (-objective.eta * (1 - tv_N)).exp()
    grad_NV.lerp_(q_NV.mul_(teacher.mass_N1).sub_(teacher.p_NV), share_N[:, None])
    return torch.lerp(tv_N, kl_N, share_N), grad_NV


def _plain_kl(_: Objective, log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    m_N = teacher.p_NV.sum(-1)
    return F.kl_div(log_q_NV, teacher.p_NV, reduction="none").sum(-1) - torch.xlogy(m_N, m_N)


def _plain_ce(_: Objective, log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    return F.nll_loss(log_q_NV, teacher.label_N, ignore_index=-1, reduction="none")


def _plain_reverse_kl(_: Objective, log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    return F.kl_div(teacher.log_NV, log_q_NV, reduction="none", log_target=True).sum(-1)


def _plain_jsd(_: Objective, log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    q_NV, p_NV = log_q_NV.exp(), teacher.p_NV
    log_mean_NV = ((p_NV + q_NV) / 2).clamp_min(torch.finfo(q_NV.dtype).tiny).log()
    of_p_N = F.kl_div(log_mean_NV, p_NV, reduction="none").sum(-1)
    of_q_N = (q_NV * (log_q_NV - log_mean_NV)).sum(-1)
    return (of_p_N + of_q_N + (1 - p_NV.sum(-1)) * math.log(2)) / 2


def _plain_tv(_: Objective, log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    return 1 - torch.minimum(log_q_NV.exp(), teacher.p_NV).sum(-1)


def _plain_lk(objective: Objective, log_q_NV: Tensor, teacher: Teacher) -> Tensor:
    tv_N = _plain_tv(objective, log_q_NV, teacher)
    share_N = (-objective.eta * (1 - tv_N.detach())).exp()
    return share_N * _plain_kl(objective, log_q_NV, teacher) + (1 - share_N) * tv_N


_WRITTEN_OUT: dict[str, Callable[[Objective, Tensor, Teacher, Scratch], tuple[Tensor, Tensor]]] = {
    "kl": _kl,
    "ce": _ce,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "tv": _tv,
    "lk": _lk,
    "topk": _kl,
}
_PLAIN: dict[str, Callable[[Objective, Tensor, Teacher], Tensor]] = {
    "kl": _plain_kl,
    "ce": _plain_ce,
    "reverse_kl": _plain_reverse_kl,
    "jsd": _plain_jsd,
    "tv": _plain_tv,
    "lk": _plain_lk,
    "topk": _plain_kl,
}
OBJECTIVES = tuple(_WRITTEN_OUT)
"""kl: forward KL to the target. ce: cross-entropy to the target's likeliest word; nothing where the head lacks it.
reverse_kl: KL from the head to the target. jsd: Jensen-Shannon. tv: 1 - sum(min(p, q)), the rejection rate of speculative
sampling. lk: s KL + (1 - s) TV with s = exp(-eta (1 - TV)) held constant, at each label (arXiv 2602.23881). topk: kl over the
target's likeliest words alone."""


def parse_objective(text: str, step_weights: tuple[float, ...] = ()) -> Objective:
    """Return the objective that a text names: one of OBJECTIVES, maybe with its number: `topk:k=64`, `lk:eta=3`.

    Raises HeadwayError for anything else, and for weights that are not finite, below 0 or all 0.
    """
    name, colon, rest = text.strip().partition(":")
    if name not in OBJECTIVES:
        near = get_close_matches(name, OBJECTIVES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(OBJECTIVES)}"
        raise HeadwayError(f"unknown loss {text!r}; {hint}")
    objective = Objective(name)
    if colon:
        objective = _with_number(objective, text, rest)
    if step_weights and not (all(0 <= w < math.inf for w in step_weights) and any(step_weights)):
        raise HeadwayError(
            f"step_weights is {list(step_weights)}; give finite numbers of 0 or more, one above 0 at least"
        )
    return replace(objective, step_weights=tuple(step_weights))


def _with_number(objective: Objective, text: str, rest: str) -> Objective:
    key, _, number = rest.partition("=")
    try:
        if objective.name == "topk" and key == "k" and int(number) >= 1:
            return replace(objective, top_k=int(number))
        if objective.name == "lk" and key == "eta" and 0 <= float(number) < math.inf:
            return replace(objective, eta=float(number))
    except ValueError:
        pass
    takes = {"topk": "a whole number of 1 or more: topk:k=64", "lk": "a finite number of 0 or more: lk:eta=3"}
    raise HeadwayError(f"cannot read loss {text!r}; {objective.name} takes {takes.get(objective.name, 'no number')}")

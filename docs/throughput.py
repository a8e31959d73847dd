"""Measures how fast EAGLE-3 heads train: Headway beside speculators and SpecForge, on the same features of the same dialogs.

    python -m venv S && S/bin/pip install speculators==0.9.0
    python -m venv F && F/bin/pip install specforge==0.2.0
    python docs/throughput.py TARGET --dialogs DIALOGS --work WORK --speculators S/bin/python --specforge F/bin/python \
        --dtype float32 bfloat16 --supervise answers all --out throughput.json

Features of a few batches are captured once, to WORK. Each contestant is a process of its own Python, which trains on the
batches in turn, all of them once a round; rounds are interleaved and the process of a contestant whose turn it is not sleeps.
What is timed is the step: forward of the steps of the training-time test, loss, backward, clip, AdamW, and the figures that
each trainer reads off the device for its log. Making batches is not. Linux.

What is a peer's own is left as it is: draft model, loss, gradient clip, optimizer, and what it compiles. On a CPU neither has
its Triton loss; speculators has an eager one to choose, and of SpecForge the reference beside its kernel stands in. speculators
packs the rows of a batch one after another, the others pad them. Its LM head is frozen; `speculators+head` trains it too.

`--only headway "headway compiled"` measures the recipe key `compile` instead.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor

Step = Callable[[dict[str, Tensor]], float]
"""Train on a batch; return the loss."""
LR = 1e-3


@dataclass
class Contest:
    """What every contestant does."""

    target: str
    dtype: torch.dtype
    steps: int
    vocab: Tensor
    """Target ids of the draft vocabulary [V], sorted; all of them for the whole vocabulary."""
    vocab_size: int
    taps: tuple[int, ...]
    attention: str
    """Of speculators: sdpa or eager; its flex attention has no backward on a CPU."""

    @property
    def is_whole(self) -> bool:
        """Whether the draft vocabulary is the target's."""
        return len(self.vocab) == self.vocab_size

    def maps(self) -> tuple[Tensor, Tensor]:
        """Return t2d (bool, of each target id) and d2t (offsets)."""
        t2d = torch.zeros(self.vocab_size, dtype=torch.bool)
        t2d[self.vocab] = True
        return t2d, self.vocab - torch.arange(len(self.vocab))


def headway(contest: Contest, compile: bool = False) -> tuple[Step, torch.nn.Module]:
    """Return a step as `headway train` does it, and what it trains."""
    from headway.heads.common.protocol import Batch, find_family
    from headway.inference.target import Target
    from headway.train.compiled import Compiled
    from headway.train.config import TrainConfig
    from headway.train.optimizers import make_optimizer

    config = TrainConfig(family="eagle3", target=contest.target, dialogs="", out="", max_steps=1, lr=LR)
    target = Target.load(contest.target, dtype=str(contest.dtype).removeprefix("torch."))
    config_class, head_class = find_family("eagle3")
    words = 0 if contest.is_whole else len(contest.vocab)
    fields = {"steps": contest.steps, "draft_vocab_size": words, "taps": contest.taps}
    head = head_class(config_class.for_target(target.info, **fields), target.frozen)
    if words:
        head.set_draft_vocab(contest.vocab)
    head.warm_start()
    head.float()
    if compile:
        head.compiled = Compiled("eagle3", torch.device("cpu"), rough=contest.dtype == torch.bfloat16)
    optimizer = make_optimizer(config, head)

    def step(given: dict[str, Tensor]) -> float:
        batch = Batch(
            given["token"], given["length"], given["supervised"], given["tap"], given["last"],
            given["normaliser"], given["argmax"],
        )  # fmt: skip
        with torch.autocast("cpu", torch.bfloat16, enabled=contest.dtype == torch.bfloat16):
            report = head.loss(batch)
        loss = float(report.loss.detach())
        report.loss.backward()
        float(torch.nn.utils.clip_grad_norm_(head.parameters(), config.clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        report.agreement_S.tolist()
        return loss

    return step, head


def speculators(contest: Contest, with_head: bool = False) -> tuple[Step, torch.nn.Module]:
    """Return a step as the trainer of speculators does it, and what it trains."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.train.optimizers import build_optimizers
    from speculators.train.trainer import TrainerConfig
    from transformers import AutoConfig

    layer = AutoConfig.from_pretrained(contest.target)
    layer.num_hidden_layers = 1
    layer.dtype = torch.float32
    t2d, d2t = contest.maps()
    model = Eagle3DraftModel.from_training_args(
        layer,
        t2d,
        d2t,
        draft_vocab_size=len(contest.vocab),
        norm_before_residual=False,
        target_layer_ids=[tap + 1 for tap in contest.taps],
        verifier_name_or_path=contest.target,
        ttt_steps=contest.steps,
        draft_attn_impl=contest.attention,
    ).float()
    model.verifier_norm = torch.nn.Identity()  # the features are those after it
    model.lm_head.weight.requires_grad_(with_head)
    model.train()
    (optimizer,) = build_optimizers(model, TrainerConfig(lr=LR, num_epochs=1, save_path=""))
    arguments = {
        "ttt_steps": contest.steps,
        "ttt_step_loss_decay": 0.8,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }

    def step(given: dict[str, Tensor]) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=contest.dtype == torch.bfloat16):
            _, loss, metrics = model(**given, **arguments)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return {name: value.item() for name, value in metrics.items()}["loss_sum"]

    return step, model


def packed(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch as speculators takes it: rows one after another, each shifted so that token t + 1 lies at feature t."""
    parts: dict[str, list[Tensor]] = {}
    for b, length in enumerate(given["length"].tolist()):
        row = {
            "input_ids": given["token"][b, 1:length],
            "hidden_states": given["tap"][b, : length - 1],
            "verifier_last_hidden_states": given["last"][b, 1:length],
            "loss_mask": given["supervised"][b, 1:length],
            "position_ids": torch.arange(1, length),
            "document_ids": torch.full((length - 1,), b),
        }
        for name, value in row.items():
            parts.setdefault(name, []).append(value)
    return {name: torch.cat(values)[None] for name, values in parts.items()}


def specforge(contest: Contest, compact: bool = False) -> tuple[Step, torch.nn.Module]:
    """Return a step as the trainer of SpecForge does it on one process without FSDP, and what it trains."""
    import specforge.algorithms.eagle3.model as eagle3
    from safetensors.torch import load_file
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import AutoConfig

    class Reference:
        """The reference implementation in place of the Triton kernel, which needs a GPU."""

        apply = staticmethod(_compute_loss)

    eagle3.LogSoftmaxLoss = Reference
    config = AutoConfig.from_pretrained(contest.target)
    config.num_hidden_layers, config.draft_vocab_size, config.tie_word_embeddings = 1, len(contest.vocab), False
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.load_embedding(contest.target)
    draft.freeze_embedding()
    t2d, d2t = contest.maps()
    draft.t2d.copy_(t2d)
    draft.d2t.copy_(d2t)
    model = eagle3.OnlineEagle3Model(draft, length=contest.steps, attention_backend="sdpa").to(contest.dtype).train()
    head = TargetHead(contest.target)  # its loader wants a sharded checkpoint with an lm_head.weight
    weights = load_file(Path(contest.target) / "model.safetensors")
    with torch.no_grad():
        head.fc.weight.copy_(weights.get("lm_head.weight", weights["model.embed_tokens.weight"]))
    head.freeze_weights()
    head = head.eval().to(contest.dtype)
    strategy = Eagle3TrainStrategy(model, target_head=head, compact_teacher=compact)
    optimizer = BF16Optimizer(draft, lr=LR, max_grad_norm=0.5, warmup_ratio=0.0)

    def step(given: dict[str, Tensor]) -> float:
        real = (torch.arange(given["token"].shape[1]) < given["length"][:, None]).long()
        tensors = {
            "input_ids": given["token"],
            "attention_mask": real,
            "loss_mask": given["supervised"].long(),
            "hidden_state": given["tap"],
            "target": given["last"],
        }
        batch = TrainBatch([], "eagle3", tensors, {"target_repr": "hidden_state"})
        out = strategy.forward_loss(batch)
        loss = float(out.loss.detach())
        out.loss.backward()
        optimizer.step()
        return loss

    return step, draft


CONTESTANTS: dict[str, Callable[[Contest], tuple[Step, torch.nn.Module]]] = {
    "headway": headway,
    "headway compiled": lambda contest: headway(contest, compile=True),
    "speculators": speculators,
    "speculators+head": lambda contest: speculators(contest, with_head=True),
    "specforge": specforge,
    "specforge compact": lambda contest: specforge(contest, compact=True),
}


def prepare(batch: dict[str, Tensor], contest: Contest, supervise: str) -> dict[str, Tensor]:
    """Return a captured batch in the dtype of the contest, with its goals."""
    batch = dict(batch)
    for name in ("tap", "last"):
        batch[name] = batch[name].to(contest.dtype)
    answers, real = batch.pop("answers"), torch.arange(batch["token"].shape[1]) < batch["length"][:, None]
    batch["supervised"] = real if supervise == "all" else answers
    return batch


def work(name: str, settings: dict[str, Any]) -> None:
    """Be a contestant: get ready, then train a round for each line that comes in, and say how it went."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.manual_seed(0)
    torch.set_num_threads(settings["threads"])
    work_folder = Path(settings["work"])
    facts = json.loads((work_folder / "facts.json").read_text())
    words = torch.arange(facts["vocab_size"]) if settings["vocab"] == 0 else torch.tensor(facts["vocab"])
    contest = Contest(
        target=settings["target"],
        dtype=getattr(torch, settings["dtype"]),
        steps=settings["steps"],
        vocab=words,
        vocab_size=facts["vocab_size"],
        taps=tuple(facts["taps"]),
        attention=settings["attention"],
    )
    step, module = CONTESTANTS[name](contest)
    batches = [prepare(b, contest, settings["supervise"]) for b in load(work_folder)[: settings["batches"]]]
    if name.startswith("speculators"):
        batches = [packed(b) for b in batches]
    before = resident("VmRSS")
    losses = [step(batch) for batch in batches]  # brings libraries along and compiles what is compiled
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    print(json.dumps({"trained": trained, "first_loss": losses[0]}), file=answer, flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        seconds, cpu = [], process_time()
        for batch in batches:
            begin = perf_counter()
            losses.append(step(batch))
            seconds.append(perf_counter() - begin)
        row = {"seconds": seconds, "cpu_seconds": process_time() - cpu, "loss": losses[-1]}
        row["memory_mb"] = resident("VmHWM") - before
        print(json.dumps(row), file=answer, flush=True)


def resident(field: str) -> float:
    """Return a figure of this process's memory in MB: VmRSS now, VmHWM at its greatest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024 / 1e6


def load(folder: Path) -> list[dict[str, Tensor]]:
    """Return the captured batches."""
    from safetensors.torch import load_file

    return [load_file(path) for path in sorted(folder.glob("batch-*.safetensors"))]


def capture(target_name: str, dialogs: str, folder: Path, num_batches: int, tokens_per_batch: int, vocab: int) -> None:
    """Write the features of some batches, chosen as a run would choose its first ones, and the draft vocabulary."""
    from safetensors.torch import save_file

    from headway.data.dialogs import read_dialogs
    from headway.heads.common.draft_layer import default_taps
    from headway.heads.common.vocab import choose_draft_vocab
    from headway.inference.target import Target
    from headway.train.batches import Order, count_tokens, make_batches, make_rows
    from headway.train.features import Features

    target = Target.load(target_name, dtype="float32")
    rows = make_rows(read_dialogs(dialogs), 1024, 0.05, 64, "answers").train
    all_rows = {row.id: row for row in make_rows(read_dialogs(dialogs), 1024, 0.05, 64, "all").train}
    counts = count_tokens(rows, target.info.vocab_size)
    words = choose_draft_vocab(counts, vocab, target.info.num_tokens, always_keep=target.eos_ids)
    batches = make_batches(rows, tokens_per_batch)
    taps = default_taps(target.info.num_layers)
    order = Order(len(batches), 0)
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(num_batches):
        chosen = batches[order[n]]
        # The teacher's figures at every token, for both ways to supervise.
        batch = Features(target, taps, [[all_rows[row.id] for row in chosen]]).compute(0)
        answers = torch.zeros_like(batch.supervised_BT)
        for b, row in enumerate(chosen):
            answers[b, : len(row.supervised)] = torch.tensor(row.supervised)
        assert batch.normaliser_BT is not None
        assert batch.argmax_BT is not None
        tensors = {
            "token": batch.token_BT, "length": batch.length_B, "answers": answers, "tap": batch.tap_BTF.bfloat16(),
            "last": batch.last_BTD.bfloat16(), "normaliser": batch.normaliser_BT, "argmax": batch.argmax_BT,
        }  # fmt: skip
        save_file({name: t.contiguous() for name, t in tensors.items()}, folder / f"batch-{n:02d}.safetensors")
    facts = {"vocab": words.tolist(), "vocab_size": target.info.vocab_size, "taps": list(taps)}
    (folder / "facts.json").write_text(json.dumps(facts))


def count_goals(batch: dict[str, Tensor], supervise: str) -> int:
    """Return the supervised tokens of a batch that have an anchor."""
    if supervise == "all":
        return int((batch["length"] - 2).clamp_min(0).sum())
    return int(batch["answers"][:, 2:].sum())


def compete(pythons: dict[str, str], settings: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Let the contestants train, round by round in turn; return what each took, or how it failed."""
    processes, results = {}, {}
    for name, python in pythons.items():
        command = [python, __file__, "work", name, json.dumps(settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(settings["threads"]), "HF_HUB_OFFLINE": "1"}
        processes[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        ready = said(processes[name])  # before the next begins
        if ready:
            results[name] = {**json.loads(ready), "rounds": []}
        else:
            results[name] = {"failed": processes.pop(name).communicate()[1].strip().splitlines()[-1:]}
    for n in range(rounds):
        names = list(processes)
        for name in names[n % len(names) :] + names[: n % len(names)]:
            results[name]["rounds"].append(json.loads(said(processes[name], "round\n")))
    for process in processes.values():
        process.communicate("end\n")
    return results


def said(process: subprocess.Popen[str], asked: str = "") -> str:
    """Return the next line of a contestant, asked for one or not."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(asked)
    process.stdin.flush()
    return process.stdout.readline()


def tabulate(results: dict[str, Any], tokens: int) -> list[dict[str, Any]]:
    """Return a row for each contestant: the median over rounds."""
    rows = []
    for name, result in results.items():
        if "failed" in result:
            rows.append({"name": name, **result})
            continue
        totals = [sum(r["seconds"]) for r in result["rounds"]]
        rows.append(
            {
                "name": name,
                "tokens_per_s": tokens / median(totals),
                "range": [tokens / max(totals), tokens / min(totals)],
                "step_ms": 1e3 * median(totals) / len(result["rounds"][0]["seconds"]),
                "cpu_ms": 1e3
                * median(r["cpu_seconds"] for r in result["rounds"])
                / len(result["rounds"][0]["seconds"]),
                "memory_mb": max(r["memory_mb"] for r in result["rounds"]),
                "trained": result["trained"],
                "losses": [result["first_loss"], result["rounds"][-1]["loss"]],
            }
        )
    return rows


def spell(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table, with the ratio of Headway's rate to each."""
    ours = next((r for r in rows if r["name"] == "headway" and "failed" not in r), None)
    titles = (
        "tokens/s  (least-most)    step ms     CPU ms  memory MB  trained M  loss, first and last  headway x  by CPU"
    )
    lines = [f"  {'':18s} {titles}"]
    for r in rows:
        if "failed" in r:
            lines.append(f"  {r['name']:18s} failed: {r['failed']}")
            continue
        ratio = f"{ours['tokens_per_s'] / r['tokens_per_s']:.2f}" if ours else "-"
        by_cpu = f"{r['cpu_ms'] / ours['cpu_ms']:.2f}" if ours else "-"
        low, high = r["range"]
        lines.append(
            f"  {r['name']:18s} {r['tokens_per_s']:8.0f}  ({low:5.0f}-{high:5.0f})  {r['step_ms']:9.0f}  {r['cpu_ms']:9.0f}"
            f"  {r['memory_mb']:9.0f}  {r['trained'] / 1e6:9.2f}  {r['losses'][0]:10.3f} {r['losses'][1]:10.3f}"
            f"  {ratio:>8s}  {by_cpu:>6s}"
        )
    return "\n".join(lines)


def main() -> None:
    """Capture what is missing, compete in every setting, print tables, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="folder of a Llama-like model")
    parser.add_argument("--dialogs", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the features")
    parser.add_argument("--speculators", help="Python that has speculators")
    parser.add_argument("--specforge", help="Python that has specforge")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--supervise", nargs="+", default=["answers"], choices=["answers", "all"])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096], help="draft vocabulary; 0 is the target's")
    parser.add_argument("--attention", default="sdpa", help="of speculators: sdpa or eager")
    parser.add_argument("--only", nargs="+", help="these contestants only")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--tokens-per-batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not (given.work / "facts.json").is_file():
        words = next((v for v in given.vocab if v), 4096)
        capture(given.target, given.dialogs, given.work, given.batches, given.tokens_per_batch, words)
    of_python = {"headway": sys.executable, "speculators": given.speculators, "specforge": given.specforge}
    names = given.only or [name for name in CONTESTANTS if " " not in name]
    pythons = {name: of_python[name.split("+")[0].split()[0]] for name in names}
    pythons = {name: python for name, python in pythons.items() if python}
    batches = load(given.work)[: given.batches]
    sizes = " ".join("x".join(map(str, b["token"].shape)) for b in batches)
    report: list[dict[str, Any]] = []
    for vocab, dtype, supervise in product(given.vocab, given.dtype, given.supervise):
        tokens = sum(count_goals(b, supervise) for b in batches)
        settings = {
            "target": given.target, "work": str(given.work), "dtype": dtype, "supervise": supervise, "vocab": vocab,
            "steps": given.steps, "attention": given.attention, "threads": given.threads, "batches": given.batches,
        }  # fmt: skip
        rows = tabulate(compete(pythons, settings, given.rounds), tokens)
        print(f"{dtype}, draft vocabulary {vocab or 'whole'}, {supervise}: {tokens} supervised tokens in {sizes}")
        print(spell(rows), flush=True)
        report.append({"settings": settings, "tokens": tokens, "rows": rows})
    if given.out:
        given.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        work(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()

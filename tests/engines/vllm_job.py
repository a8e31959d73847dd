"""Serves heads that `headway export` wrote with a real vLLM, and compares it with Headway's own decoding.

    python -m tests.engines.vllm_job --vllm .venv-vllm/bin/python --out runs/vllm --report docs/vllm.md

`make test-vllm` does this. Of each head: vLLM's greedy answers are the ids that it gives without a head, and what it accepts
at each drafted position is within 0.02 of chain decoding here, which accepts at least a tenth of the first drafted tokens, since
two heads that accept nothing agree on anything. Of each damaged folder: `headway check` refuses it. Heads are
those given with --head NAME=FOLDER; others are trained, briefly, on the target's answers to the very prompts that are
compared, which says nothing of heads but makes it plain whether their weights are read.

What is done lies in --out and is not done again. --only eagle,peagle leaves the other heads out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from safetensors.torch import load_file, save_file

from headway.cli import main as headway
from headway.data.chat import prompt_ids
from headway.foreign import as_drafted, family_of
from headway.heads.common.checkpoint import load_head
from headway.heads.common.protocol import Head
from headway.inference.embedded import FOLDER, REPO, smollm2
from headway.inference.generate import Request, generate
from headway.inference.sampling import Settings
from headway.inference.target import Target
from headway.inference.tree import chain

TOKENS, DEPTH, TOLERANCE = 64, 3, 0.02
LEAST = 0.1
"""Share of the first drafted tokens that our own decoding has to accept, for agreement to show anything."""
IDS = "eagle_aux_hidden_state_layer_ids"
HEADS = ("eagle3", "eagle", "peagle", "medusa")
LAYOUTS = (
    ("eagle3", "vllm"),
    ("eagle3", "speculators"),
    ("eagle", "vllm"),
    ("peagle", "vllm"),
    ("peagle", "speculators"),
    ("medusa", "vllm"),
    ("medusa", "medusa"),
)
FIELDS = {"eagle": ("head.token_weight=1.0", "head.feature_weight=0.1", "head.noise=0.0", "head.steps=3", "lr=5e-4")}
"""Over the recipes, where they would take too long to show anything: later positions need training on own predictions."""
PROMPTS = (
    "Write a Python function that tells whether a word is a palindrome.",
    "What is the difference between weather and climate?",
    "A baker sells 14 loaves in the morning and twice as many after noon. How many in all?",
    "Name five animals that sleep in winter.",
    "Write a short letter to a neighbour whose dog barks at night.",
    "How does a bicycle stay upright?",
    "Give me a recipe for pancakes for two people.",
    "Write an SQL query that counts the orders of each customer.",
    "Why do we have leap years?",
    "Tell a story of three sentences about a lighthouse.",
)


@dataclass(frozen=True)
class Fault:
    """A damage to an exported folder that vLLM loads without a word."""

    head: str
    layout: str
    what: str
    without: tuple[str, ...] = ()
    """Tensors that go."""
    config: tuple[tuple[str, Any], ...] = ()
    """Fields that change; None takes one out."""


FAULTS = {
    "no-up-proj": Fault("eagle", "vllm", "`layers.0.mlp.up_proj.weight` missing", ("layers.0.mlp.up_proj.weight",)),
    "no-down-proj": Fault("eagle3", "vllm", "`midlayer.mlp.down_proj.weight` missing", ("midlayer.mlp.down_proj.weight",)),
    "no-layer": Fault("peagle", "vllm", "`layers.1.mlp.down_proj.weight` missing", ("layers.1.mlp.down_proj.weight",)),
    "no-lm-heads": Fault("medusa", "vllm", "no LM heads", ("lm_heads.",)),
    "taps": Fault("eagle3", "vllm", "taps written as outputs of layers", (), ((IDS, -1), ("eagle_config", None))),
    "norm-flag": Fault("eagle3", "speculators", "`norm_before_residual` left out", (), (("norm_before_residual", None),)),
}  # fmt: skip


def damage(source: Path, out: Path, fault: Fault) -> None:
    """Write a damaged copy of an export, without the note by which `headway check` would know it for changed."""
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out)
    (path,) = out.glob("*.safetensors")
    held = load_file(path)
    kept = {name: tensor for name, tensor in held.items() if not name.startswith(fault.without or ("\0",))}
    assert len(kept) < len(held) or not fault.without, fault
    save_file(kept, path)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    del config["headway"]
    for key, value in fault.config:
        if key == IDS:
            config[key] = [i + value for i in config[key]]
        elif value is None:
            del config[key]
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")


def count_accepted(rounds: Sequence[Sequence[int]], tokens: int, depth: int) -> tuple[int, list[int]]:
    """Return the drafts begun before each row's first `tokens` tokens were there, and how often each position was accepted.

    `rounds` holds the tokens of each round, bonus included; a first token came before them.
    """
    drafts, accepted = 0, [0] * depth
    for row in rounds:
        there = 1
        for emitted in row:
            if there >= tokens:
                break
            drafts, there = drafts + 1, there + emitted
            accepted = [n + (i < emitted - 1) for i, n in enumerate(accepted)]
    return drafts, accepted


def rates(drafts: int, accepted: Sequence[float]) -> list[float]:
    """Return the share of drafts whose position was accepted, of each position."""
    return [n / max(drafts, 1) for n in accepted]


def judge(plain: list[list[int]], result: dict[str, Any], own: list[float]) -> list[str]:
    """Return what is wrong with a case: other ids than without a head, or another rate than ours at a position."""
    if "error" in result:
        return [result["error"]]
    wrong = []
    differ = [i for i, (a, b) in enumerate(zip(plain, result["answers"], strict=True)) if a != b]
    if differ:
        wrong.append(f"greedy ids differ from plain vLLM's on prompts {differ}")
    theirs = rates(result["num_drafts"], result["num_accepted_tokens_per_pos"])
    if len(theirs) != len(own) or any(abs(a - b) > TOLERANCE for a, b in zip(theirs, own, strict=True)):
        wrong.append(f"accepted at each position {_row(theirs)}, here {_row(own)}")
    if own[0] < LEAST:
        wrong.append(
            f"not shown: of the first drafted tokens {own[0]:.3f} are accepted here, below {LEAST}; give a better --head"
        )
    return wrong


def _row(values: Sequence[float]) -> str:
    return " ".join(f"{v:.3f}" for v in values)


def command(*argv: str | Path) -> tuple[int, str]:
    """Return the exit code of a headway command, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = headway([str(a) for a in argv])
    return code, printed.getvalue()


def must(*argv: str | Path) -> str:
    """Return what a headway command printed; it must succeed."""
    code, printed = command(*argv)
    if code:
        raise SystemExit(f"headway {shlex.join(map(str, argv))}: exit code {code}\n{printed}")
    return printed


def train_heads(names: Sequence[str], model: Path, out: Path, steps: int) -> dict[str, Path]:
    """Return the folders of heads, each trained for so many steps on the target's answers to PROMPTS."""
    prompts, dialogs = out / "prompts.jsonl", out / "dialogs"
    out.mkdir(parents=True, exist_ok=True)
    if not prompts.is_file():
        rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in PROMPTS]
        prompts.write_text("\n".join(rows) + "\n", encoding="utf-8")
    for name in names:
        if (out / name / "head").is_dir():
            continue
        if not dialogs.is_dir():
            print("job: the target answers", flush=True)
        same = ("--target", model, "--prompts", prompts, "--max-new-tokens", "96", "--batch-size", "16")
        must("distill", *same, "--out", dialogs)
        print(f"job: train {name}", flush=True)
        fields = [
            f"target={model}",
            f"dialogs={dialogs}",
            f"out={out / name}",
            "max_seconds=null",
            f"max_steps={steps}",
        ]
        fields += ["eval_every=1000000", "eval_prompts=1", "eval_tokens=8", "lr=2e-3", *FIELDS.get(name, ())]
        must("train", Path("recipes") / f"smollm2-{name}.yaml", *fields)
    return {name: out / name / "head" for name in names}


def depth_of(head: Head) -> int:
    """Return the tokens of a draft in the command that export prints: of P-EAGLE all, since they cost one pass."""
    return head.max_depth or DEPTH if family_of(head) == "peagle" else DEPTH


class Job:
    """The folders and the results of one run."""

    def __init__(self, model: Path, heads: dict[str, Path], out: Path) -> None:
        self.model, self.heads, self.out = model, heads, out
        self.target = Target.load(str(model), dtype="float32")
        assert self.target.tokenizer is not None
        self.prompts = [prompt_ids(self.target.tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
        self.cases: dict[str, dict[str, Any]] = {"plain": {"model": str(model), "speculative": None}}
        self.commands: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.own: dict[str, tuple[int, list[int]]] = {}
        self.layouts = [(head, layout) for head, layout in LAYOUTS if head in heads]
        self.faults = {name: fault for name, fault in FAULTS.items() if fault.head in heads}

    def export(self) -> None:
        """Export every head to every layout, proven by --check; the commands that are printed are what vLLM then gets."""
        for head, layout in self.layouts:
            name, folder = f"{head}-{layout}", self.out / "exports" / f"{head}-{layout}"
            print(f"job: export {name}", flush=True)
            lines = must(
                "export", self.heads[head], "--to", layout, "--out", folder, "--target", self.model, "--check"
            ).splitlines()
            self.commands[name] = lines[1]
            self.cases[name] = self._as_printed(layout, lines[1], head, folder)

    def _as_printed(self, layout: str, line: str, head: str, folder: Path) -> dict[str, Any]:
        words = shlex.split(line)
        if words[:2] != ["vllm", "serve"]:  # the Medusa repository's layout, which vLLM reads too
            method = {"method": head, "model": str(folder), "num_speculative_tokens": DEPTH}
            return {"model": str(self.model), "speculative": method}
        return {"model": words[2], "speculative": json.loads(words[4]) if len(words) > 3 else None}

    def spoil(self) -> None:
        """Damage copies of the exports and let `headway check` judge them."""
        for name, fault in self.faults.items():
            source, folder = f"{fault.head}-{fault.layout}", self.out / "damaged" / name
            damage(self.out / "exports" / source, folder, fault)
            code, printed = command(
                "check",
                folder,
                "--target",
                self.model,
                "--head",
                self.heads[fault.head],
                "--as",
                fault.layout,
                "-n",
                "24",
            )
            faults = [line.removeprefix("fault: ") for line in printed.splitlines() if line.startswith("fault: ")]
            self.refused[name] = "; ".join(faults) if code == 1 else ""
            print(f"job: check {name}: {self.refused[name] or 'not refused'}", flush=True)
            case = self.cases[source]
            if case["speculative"] is None:
                self.cases[name] = {"model": str(folder), "speculative": None}
            else:
                self.cases[name] = {**case, "speculative": {**case["speculative"], "model": str(folder)}}

    def decode(self) -> list[list[int]]:
        """Decode with each head here, in chains as long as vLLM's; return the greedy answers without a head."""
        kept = self.out / "own.json"
        held = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}

        def answers(head: Head | None) -> dict[str, Any]:
            # Longer than what is compared, so that no draft is cut short by the end.
            depth = DEPTH if head is None else depth_of(head)
            settings = Settings(max_new_tokens=TOKENS + depth + 1, eos_ids=())
            requests = [Request(ids, settings, i) for i, ids in enumerate(self.prompts)]
            policy = None if head is None else chain(depth)
            found = {r.id: r for r in generate(self.target, requests, head=head, policy=policy, batch_size=5)}
            rows = [found[i] for i in range(len(requests))]
            rounds = [r.accepted_per_round for r in rows]
            return {"ids": [r.token_ids[:TOKENS] for r in rows], "rounds": rounds, "depth": depth}

        for name, folder in {"plain": None, **self.heads}.items():
            if name not in held:
                print(f"job: decode here: {name}", flush=True)
                head = (
                    None
                    if folder is None
                    else as_drafted(load_head(folder, self.target, dtype="float32")).float().eval()
                )
                held[name] = answers(head)
                kept.write_text(json.dumps(held), encoding="utf-8")
            if folder is not None:
                self.own[name] = count_accepted(held[name]["rounds"], TOKENS, held[name]["depth"])
        return held["plain"]["ids"]

    def serve(self, python: Path) -> dict[str, dict[str, Any]]:
        """Run vLLM on every case that has no result; return the results."""
        folder = self.out / "results"
        folder.mkdir(parents=True, exist_ok=True)
        for name, case in self.cases.items():
            case["out"] = str(folder / f"{name}.json")
        open_ = {name: case for name, case in self.cases.items() if not Path(case["out"]).is_file()}
        if open_:
            path = self.out / "job.json"
            path.write_text(json.dumps({"prompts": self.prompts, "tokens": TOKENS, "cases": open_}), encoding="utf-8")
            side = Path(__file__).with_name("vllm_side.py")
            with (self.out / "vllm.log").open("a", encoding="utf-8") as log:
                ran = subprocess.run([python, side, path], stderr=log, check=False)
            if ran.returncode:
                raise SystemExit(f"vLLM ended with exit code {ran.returncode}; see {self.out / 'vllm.log'}")
        return {name: json.loads(Path(case["out"]).read_text(encoding="utf-8")) for name, case in self.cases.items()}


REPORT = """\
# Heads in vLLM

Made by `make test-vllm`: vLLM {version} on a CPU, SmolLM2-135M-Instruct, float32, greedy, {prompts} prompts of {tokens} tokens
(end ids ignored), chains of {depth}, of P-EAGLE as long as it was trained to draft. Every folder was written by
`headway export --check`, and vLLM got what the command that export prints says. *Accepted* is the share of drafts of which the
1st, 2nd, ... token was accepted: by vLLM's own counters, and in Headway, decoding the same prompts with the same head.

{heads}

| head | layout | drafts: vLLM | Headway | accepted: vLLM | Headway | ids as without a head |
|---|---|---|---|---|---|---|
{served}

Without a head, vLLM and Headway gave the same ids on {engines} of {prompts} prompts.

## What loads without a word

The same exports, damaged. The ids stay those of plain decoding; only the drafts are worth less. `headway check FOLDER --target T
--head H` refuses each, and says:

| head | layout | damage | accepted: vLLM, damaged | vLLM, whole | first fault that `headway check` names |
|---|---|---|---|---|---|
{damaged}

## Commands

As `headway export` printed them, for this target and folders named so:

```bash
{commands}
```
"""


def _accepted(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"refused: {found['error'].splitlines()[0]:.80}"
    return _row(rates(found["num_drafts"], found["num_accepted_tokens_per_pos"]))


def report(
    job: Job, results: dict[str, dict[str, Any]], here: list[list[int]], wrong: dict[str, list[str]], heads: str
) -> str:
    """Return what was run and found, as docs/vllm.md shows it; `heads` says where the heads come from."""
    plain = results["plain"]["answers"]

    def same(answers: list[list[int]]) -> int:
        return sum(a == b for a, b in zip(plain, answers, strict=True))

    served, damaged = [], []
    for head, layout in job.layouts:
        found, (drafts, accepted) = results[f"{head}-{layout}"], job.own[head]
        cells = [head, layout, f"{found.get('num_drafts', 0):.0f}", str(drafts), _accepted(found)]
        cells += [_row(rates(drafts, accepted)), f"{same(found.get('answers', [[]] * len(plain)))} of {len(plain)}"]
        served.append(f"| {' | '.join(cells)} |")
    for name, fault in job.faults.items():
        whole = results[f"{fault.head}-{fault.layout}"]
        cells = [fault.head, fault.layout, fault.what, _accepted(results[name]), _accepted(whole)]
        damaged.append(f"| {' | '.join([*cells, job.refused[name].split('; ')[0] or 'none'])} |")
    text = REPORT.format(
        version=results["plain"]["version"],
        prompts=len(plain),
        tokens=TOKENS,
        depth=DEPTH,
        heads=heads,
        served="\n".join(served),
        engines=same(here),
        damaged="\n".join(damaged),
        commands="\n".join(
            line.replace(f"{job.out}/exports/", "").replace(str(job.model), REPO)
            for line in job.commands.values()
            if line.startswith("vllm")
        ),
    )
    failed = [f"- {name}: {fault}" for name, faults in wrong.items() for fault in faults]
    return text + ("\n".join(["", "## Failed", "", *failed, ""]) if failed else "")


def main() -> None:
    """Run the job, print what failed, and end with exit code 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, help="the Python of vLLM's environment")
    parser.add_argument("--out", type=Path, default=Path("runs/vllm"))
    parser.add_argument("--model", type=Path, default=FOLDER)
    parser.add_argument("--head", action="append", default=[], metavar="NAME=FOLDER", help=f"one of {', '.join(HEADS)}")
    parser.add_argument("--only", default=",".join(HEADS), help="heads to run, joined by commas")
    parser.add_argument("--steps", type=int, default=120, help="of training, for each head that is not given")
    parser.add_argument("--heads", default="", help="what the report says of the heads, instead of how they were made")
    parser.add_argument("--report", type=Path, help="where the tables go; printed in any case")
    given = parser.parse_args()
    begin = perf_counter()
    model = smollm2(given.model)
    only = given.only.split(",")
    if unknown := set(only) - set(HEADS):
        parser.error(f"--only {unknown.pop()!r}; there are {', '.join(HEADS)}")
    named = {name: Path(folder) for name, _, folder in (text.partition("=") for text in given.head)}
    made = train_heads([name for name in HEADS if name in only and name not in named], model, given.out, given.steps)
    heads = {name: folder for name, folder in (named | made).items() if name in only}
    job = Job(model, heads, given.out)
    job.export()
    job.spoil()
    here = job.decode()
    results = job.serve(given.vllm)
    plain = results["plain"]["answers"]
    wrong = {f"{h}-{x}": judge(plain, results[f"{h}-{x}"], rates(*job.own[h])) for h, x in job.layouts}
    wrong |= {name: [] if job.refused[name] else ["headway check did not refuse it"] for name in job.faults}
    trained = [name for name in HEADS if name in made]
    told = f"Of the heads, {', '.join(trained)} were fitted to the answers to these very prompts." if trained else ""
    text = report(job, results, here, wrong, given.heads or told)
    print(text)
    if given.report is not None:
        given.report.write_text(text, encoding="utf-8")
    failed = sum(bool(texts) for texts in wrong.values())
    print(f"job: {perf_counter() - begin:.0f} s")
    print(f"{len(wrong) - failed} passed, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

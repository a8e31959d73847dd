"""What `headway export`, `headway import` and `headway check` do: heads in other engines' layouts, and the proof."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headway.heads.common.checkpoint import (
    WEIGHTS,
    fingerprint,
    head_folder,
    load_head,
    plain_name,
    read_config,
    read_weights,
    save_head,
    saved_info,
)
from headway.heads.common.errors import HeadwayError
from headway.heads.common.lm_heads import LMHeads
from headway.heads.common.protocol import Head, find_family
from headway.heads.formats.damage import check_fit, check_tensors, check_words
from headway.heads.formats.layout import (
    LAYOUTS,
    NOTE,
    Foreign,
    Saved,
    TargetWeights,
    config_digest,
    digest,
    find_layout,
    from_layout,
    read_folder,
    recognise,
    to_layout,
    write_folder,
    writes,
)
from headway.heads.formats.reference import Finding, read
from headway.inference.parity import Parity, Text, compare, weights_of, write
from headway.inference.sizes import empty_frozen
from headway.inference.target import DTYPES

if TYPE_CHECKING:
    from headway.inference.target import Target

TOKENS = 3
"""Drafted tokens in the commands that are printed, and in the comparison."""
PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "A train leaves at 9 and drives 120 km at 80 km/h. When does it arrive?",
    "List three ways to save water at home.",
)
"""What the target answers for a comparison where no prompts file is given."""


def read_saved(source: str) -> tuple[Saved, torch.dtype]:
    """Return a head's config and tensors, without its target, and its dtype (that of all if they differ).

    Raises HeadwayError where it is not whole.
    """
    folder = head_folder(source)
    config = read_config(folder)
    config_class, _ = find_family(config["family"])
    tensors = read_weights(folder, config)
    info = saved_info(config)
    saved = Saved(config["family"], config_class.from_json(config["head"]), tensors, info)
    check_tensors([(n, t) for n, t in tensors.items() if t.is_floating_point()], folder / WEIGHTS)
    check_fit(tensors, _skeleton(saved), str(folder / WEIGHTS))
    check_words(tensors, info.vocab_size, str(folder / WEIGHTS))
    return saved, _widest(tensors)


def _skeleton(saved: Saved) -> dict[str, torch.Tensor]:
    """Return names, shapes and dtypes of a head's tensors, without memory for them."""
    _, head_class = find_family(saved.family)
    with torch.device("meta"):
        return head_class(saved.config, empty_frozen(saved.info)).state_dict()


def _widest(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """Return the dtype that holds all floating tensors exactly."""
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()]
    return reduce(torch.promote_types, floats) if floats else torch.float32


def export(
    source: str, layout: str, out: Path, dtype: str | None = None, target: Target | None = None, name: str | None = None
) -> Foreign:
    """Write a head in a layout and return what was written; `name` is what the target is called in it.

    Raises HeadwayError for what the layout cannot hold, before anything is written.
    """
    saved, own = read_saved(source)
    if name is not None:
        saved.info = dataclasses.replace(saved.info, name=name)
    foreign = to_layout(
        layout, saved, own if dtype is None else DTYPES[dtype], None if target is None else weights_of(target)
    )
    weights_of_target = read_config(head_folder(source)).get("weights_of")
    foreign.config[NOTE] |= {"model_type": saved.info.model_type, "weights_of": weights_of_target}
    if target is not None and weights_of_target not in (None, fingerprint(target.frozen)):
        foreign.said.append(f"the weights of {target.info.name} are not those that the head was trained on")
    write_folder(out, foreign)
    return foreign


def _other_target(foreign: Foreign, target: Target) -> str | None:
    """Return how the target differs from that of an export, None where it is it, or where the folder does not say."""
    note, info = foreign.config.get(NOTE) or {}, target.info
    if note.get("model_type") not in (None, info.model_type):
        return (
            f"exported for {note.get('target')}, a {note['model_type']} model; {info.name} is a {info.model_type} model"
        )
    known = note.get("weights_of")
    if (
        known is None
        or plain_name(str(note.get("target"))) == plain_name(info.name)
        or known == fingerprint(target.frozen)
    ):
        return None
    return f"exported for {note.get('target')}; {info.name} has another name and other weights"


def check_layout(source: str, layout: str) -> bool:
    """Return whether exporting a head needs its target. Raises HeadwayError where the layout cannot hold the family."""
    config = read_config(head_folder(source))
    module = writes(layout, config["family"])
    config_class, _ = find_family(config["family"])
    saved = Saved(config["family"], config_class.from_json(config["head"]), {}, saved_info(config))
    return bool(module.needs_target(saved))


def serving_command(layout: str, foreign: Foreign, out: Path) -> str:
    """Return the command that serves the target with an exported head."""
    note = foreign.config[NOTE]
    tokens = min(TOKENS, foreign.config.get("num_heads") or foreign.config.get("medusa_num_heads") or TOKENS)
    tokens = note.get("depths") or tokens  # of P-EAGLE, whose tokens all cost one pass
    command: str = find_layout(layout).serve(note["family"], str(out), note["target"], tokens)
    return command


def imported(folder: Path, layout: str | None, target: Target) -> tuple[Head, str, list[str]]:
    """Return the head in a foreign folder, the layout it was read as, and what the user should know of it.

    Raises HeadwayError where the layout is open, or holds what Headway's heads cannot be.
    """
    foreign = read_folder(folder)
    layout, family = _layout(foreign, layout, folder)
    if (other := _other_target(foreign, target)) is not None:
        raise HeadwayError(f"{folder} was {other}; use it with the target it was trained for")
    saved = from_layout(layout, family, foreign, target.info, weights_of(target))
    _, head_class = find_family(saved.family)
    head = head_class(saved.config, target.frozen)
    check_fit(saved.tensors, head.state_dict(), str(folder))
    head.to(_widest(saved.tensors)).load_state_dict(saved.tensors, strict=True)
    return head.eval(), layout, foreign.said


def import_head(folder: Path, layout: str | None, target: Target, out: Path) -> tuple[Head, str, list[str]]:
    """As `imported`, and write the head to a folder."""
    head, layout, said = imported(folder, layout, target)
    save_head(head, out, target=target.info, data={"imported_from": folder.name, "layout": layout})
    return head, layout, said


def _layout(foreign: Foreign, given: str | None, folder: Path, option: str = "--from") -> tuple[str, str]:
    """Return layout and family. Raises HeadwayError, naming the option, where the layout is neither given nor clear."""
    if given is not None:
        find_layout(given)
    found, family = recognise(foreign)
    layout = given or found
    if layout is None:
        raise HeadwayError(
            f"{folder}: config.json numbers the tapped layers, and engines count them differently; give {option} vllm where they "
            f"are layers whose inputs are meant, {option} sglang for outputs"
        )
    if family not in find_layout(layout).READ:
        held = [name for name in LAYOUTS if family in find_layout(name).READ]
        there = f"; give {option} {' or '.join(held)}" if held else ", nor does any other here"
        raise HeadwayError(f"{folder} holds a head of the {family} family, which layout {layout} does not{there}")
    return layout, family


@dataclass
class Report:
    """What a check found."""

    layout: str
    family: str
    num_tensors: int
    dtype: str
    taps: list[Any] | None
    findings: list[Finding]
    parity: Parity | None
    compared: bool
    """Whether there was a head to compare with."""

    @property
    def faults(self) -> list[str]:
        """What is wrong; the folder can be served where this is empty."""
        found = [f"{finding.kind}: {finding.what}" for finding in self.findings if finding.fault]
        return found + (self.parity.faults if self.parity is not None else [])

    def lines(self) -> list[str]:
        """Return the report as it is printed."""
        lines = [f"read as {self.layout}: {self.family}, {self.num_tensors} tensors, {self.dtype}"]
        if self.taps is not None:
            lines.append(
                f"taps {', '.join(str(t) for t in self.taps)} (outputs of layers; last is after the final norm)"
            )
        if self.faults or not self.compared:  # proven to be the head's, a tensor may look as it likes
            lines += [f"note: {finding.kind}: {finding.what}" for finding in self.findings if not finding.fault]
        if self.parity is not None:
            p = self.parity
            beside = "" if p.accepted_head is None else f", {p.accepted_head:.3f} with the head"
            lines.append(f"accepted length {p.accepted_engine:.3f}{beside} (chain:{p.depth}, {p.tokens} tokens)")
            if p.difference is not None:
                lines.append(f"logits differ by {p.difference:.1e} of their range at most")
        if not self.compared:
            lines.append("note: compared with no head; give --head to prove that the drafts are its own")
        lines += [f"fault: {fault}" for fault in self.faults]
        return [*lines, "the engine would not draft as it should" if self.faults else "ok"]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON."""
        parity = None if self.parity is None else dataclasses.asdict(self.parity)
        plain = {k: getattr(self, k) for k in ("layout", "family", "num_tensors", "dtype", "taps", "compared")}
        findings = [dataclasses.asdict(finding) for finding in self.findings]
        return plain | {"findings": findings, "parity": parity, "faults": self.faults, "ok": not self.faults}


def check(
    folder: Path,
    target: Target,
    texts: Sequence[Text],
    *,
    head: Head | None = None,
    layout: str | None = None,
) -> Report:
    """Return whether an engine that reads `folder` would draft as the head does, on what the target wrote.

    Without a head, the files are looked at alone, and the taps compared with their neighbours. Raises HeadwayError where
    there is nothing to read.
    """
    foreign = read_folder(folder)
    layout, family = _layout(foreign, layout, folder, "--as")
    if head is not None and family_of(head) != family:
        raise HeadwayError(
            f"{folder} holds a {family} head, --head is a {family_of(head)} head; give the one it was made of"
        )
    weights = weights_of(target)
    reading, findings = read(layout, family, _unrounded(foreign, weights), foreign.config, target.info, weights)
    floats = {str(t.dtype).removeprefix("torch.") for t in foreign.tensors.values() if t.is_floating_point()}
    taps = None if reading is None else list(reading.taps)
    findings += _beside_note(foreign, taps)
    if (other := _other_target(foreign, target)) is not None:
        findings.append(Finding("target", other))
    if head is not None:
        head = _as_written(head, foreign)
        if taps is not None and set(taps) != set(head.config.taps):
            findings.append(Finding("config", f"the engine taps {taps}, the head {list(head.config.taps)}"))
    finite = not any(finding.kind == "not finite" for finding in findings)
    parity = None
    if reading is not None and finite:
        parity = compare(target, reading, head, texts, TOKENS)
    return Report(
        layout, family, len(foreign.tensors), ", ".join(sorted(floats)), taps, findings, parity, head is not None
    )


def family_of(head: Head) -> str:
    """Return the name of a head's family."""
    return type(head).__module__.rsplit(".", 1)[-1]


def as_drafted(head: Head) -> Head:
    """Return a head as engines draft with it: an EAGLE head over all of the target's words, others as they are."""
    if family_of(head) != "eagle" or head.draft_vocab is None:
        return head
    whole = type(head)(dataclasses.replace(head.config, draft_vocab_size=0), head.frozen)  # type: ignore[call-arg]
    whole.load_state_dict({name: tensor for name, tensor in head.state_dict().items() if name != "vocab_ids"})
    return whole


def _beside_note(foreign: Foreign, taps: list[Any] | None) -> list[Finding]:
    """Return where a folder is not what its export wrote."""
    note = foreign.config.get(NOTE)
    if not isinstance(note, dict):
        return []
    found = []
    if note.get("tensors") != digest(foreign.tensors):
        found.append(Finding("changed", "the tensors are not those that were exported"))
    if note.get("config") != config_digest(foreign.config):
        found.append(Finding("changed", "config.json is not what was exported"))
    if taps is not None and note.get("taps") is not None and set(taps) != set(note["taps"]):
        found.append(Finding("config", f"the engine taps {taps}, the exported head {note['taps']}"))
    return found


def _unrounded(foreign: Foreign, weights: TargetWeights) -> dict[str, torch.Tensor]:
    """Return the tensors with copies of the target's weights, rounded to the dtype of the files, as the target has them: the
    rounding is no fault of the export."""
    tensors = dict(foreign.tensors)
    copies = {"embed_tokens.weight": weights.embedding, "model.embed_tokens.weight": weights.embedding}
    if foreign.config.get("original_lm_head"):
        copies["lm_heads.0.weight"] = weights.lm_head
    for name, own in copies.items():
        given = tensors.get(name)
        if given is not None and given.is_floating_point() and torch.equal(given, own.cpu().to(given.dtype)):
            tensors[name] = own.cpu()
    return tensors


def _as_written(head: Head, foreign: Foreign) -> Head:
    """Return a float32 copy of the head with its weights rounded to the dtype of the files; LM heads of low rank are
    multiplied out before, as they are in the files."""
    dtype = next((t.dtype for t in foreign.tensors.values() if t.is_floating_point()), torch.float32)
    head = as_drafted(head)
    fresh = type(head)(head.config, head.frozen)
    fresh.load_state_dict(head.state_dict())
    if isinstance(getattr(fresh, "lm_heads", None), LMHeads):
        fresh.lm_heads.multiply_out()  # type: ignore[union-attr, operator]
    return fresh.to(head.frozen.lm_head_weight().device, dtype).float().eval()


def texts_of(target: Target, sources: Sequence[str], limit: int | None, max_new_tokens: int) -> list[Text]:
    """Return what the target writes after the prompts of the files, or after PROMPTS; bare ones without a chat template."""
    from headway import inputs

    if target.tokenizer is None:
        raise HeadwayError(f"{target.info.name} has no tokenizer to read prompts with; add its files to the folder")
    if sources:
        rows = [ids for _, _, ids in inputs.bench_prompts(sources, target.tokenizer, target.info, limit)]
    else:
        raw = not target.tokenizer.chat_template
        rows = [inputs.tokenize_prompt(target.tokenizer, text, raw) for text in PROMPTS[:limit]]
    return write(target, rows, max_new_tokens)


def check_source(folder: Path, target: Target, texts: Sequence[Text], source: str, layout: str | None = None) -> Report:
    """As `check`, with the head in a folder or hub repository."""
    return check(folder, target, texts, head=load_head(source, target, dtype="float32"), layout=layout)

"""The bodies of `headway export`, `headway import` and `headway check`: what they print and refuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer

from headway import foreign, inputs
from headway.heads.common.checkpoint import CONFIG, check_head_folder, read_config, saved_adapter
from headway.heads.common.errors import HeadwayError
from headway.heads.formats.layout import find_layout
from headway.inference.target import DTYPES, Target, load_info


def export_head(
    head: str,
    to: str,
    out: Path,
    target: str | None,
    dtype: str | None,
    check: bool,
    revision: str | None,
    device: str,
    adapter: str | None = None,
) -> None:
    """Write the export and print where it is and how it is served; with `check`, prove it."""
    inputs.quiet()
    if dtype is not None and dtype not in DTYPES:
        raise HeadwayError(f"unknown dtype {dtype!r}; allowed: {', '.join(DTYPES)}")
    if target is not None and not target.strip():
        raise HeadwayError("--target is empty; give the name or folder of the target, or leave it out")
    source, device = inputs.head_source(head), inputs.check_device(device)
    needed = foreign.check_layout(source, to)
    inputs.check_folder(out)
    name = target or read_config(source)["target"]["name"]
    loaded = None
    if needed or check:
        inputs.check_head(source, load_info(name, revision=revision, adapter=adapter))
        loaded = Target.load(name, device=device, revision=revision, adapter=adapter)
    written = foreign.export(source, to, out, dtype, loaded, target)
    made_with = saved_adapter(read_config(source))
    if made_with is not None:
        print(
            f"headway: the head was trained with adapter {made_with} on the target, which no layout can say; serve the target "
            "with it, or merged",
            file=sys.stderr,
        )
    for line in written.said:
        print(f"headway: {line}", file=sys.stderr)
    print(f"{out}: {len(written.tensors)} tensors, {written.config['dtype']}, layout {to}")
    print(foreign.serving_command(to, written, out))
    if check:
        assert loaded is not None
        _show(foreign.check_source(out, loaded, foreign.texts_of(loaded, [], None, 48), source, to), False)


def import_head(
    folder: Path,
    target: str,
    out: Path,
    layout: str | None,
    revision: str | None,
    device: str,
    adapter: str | None = None,
) -> None:
    """Write the head and print what it is."""
    inputs.quiet()
    if layout is not None:
        find_layout(layout)
    if not folder.is_dir():
        raise HeadwayError(f"no folder {str(folder)!r}; give a folder of config.json and weights")
    if out.resolve() == folder.resolve():
        raise HeadwayError(f"{out} is the folder that is read; give another for the head")
    check_head_folder(out)
    if (out / CONFIG).is_file() and "imported_from" not in (read_config(out).get("data") or {}):
        raise HeadwayError(f"{out} holds a head that was trained, which would be lost; give a new folder")
    inputs.check_folder(out)
    loaded = Target.load(target, device=inputs.check_device(device), revision=revision, adapter=adapter)
    head, found, said = foreign.import_head(folder, layout, loaded, out)
    for line in said:
        print(f"headway: {line}", file=sys.stderr)
    count = sum(t.numel() for t in head.parameters())
    print(
        f"{out}: {foreign.family_of(head)} head of {count / 1e6:.1f}M parameters, taps {list(head.config.taps)}, read as {found}"
    )


def check_folder(
    folder: Path,
    target: str,
    head: str | None,
    layout: str | None,
    prompts: list[str],
    limit: int | None,
    max_new_tokens: int,
    dtype: str,
    device: str,
    revision: str | None,
    as_json: bool,
    adapter: str | None = None,
) -> None:
    """Print the report; exit code 1 where it has a fault."""
    inputs.quiet()
    dtype, device = inputs.check_dtype(dtype), inputs.check_device(device)
    if layout is not None:
        find_layout(layout)
    if not (folder / CONFIG).is_file():
        raise HeadwayError(f"{folder / CONFIG} does not exist; give the folder that an engine is to read")
    source = None if head is None else inputs.head_source(head)
    if source is not None:
        inputs.check_head(source, load_info(target, revision=revision, adapter=adapter))
    loaded = Target.load(target, dtype=dtype, device=device, revision=revision, adapter=adapter)
    texts = foreign.texts_of(loaded, prompts, limit, max_new_tokens)
    if source is None:
        report = foreign.check(folder, loaded, texts, layout=layout)
    else:
        report = foreign.check_source(folder, loaded, texts, source, layout)
    _show(report, as_json)


def _show(report: foreign.Report, as_json: bool) -> None:
    print(json.dumps(report.to_json()) if as_json else "\n".join(report.lines()))
    if report.faults:
        raise typer.Exit(1)

"""Raw rows from a file, a folder or a `datasets` id: numbered, parsed, never fatal for one broken line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headway.heads.common.errors import HeadwayError

_SUFFIXES = (".jsonl", ".json", ".parquet")


class RowError(ValueError):
    """Why one row cannot be used; the message is the reason that is counted."""


NumberedRow = tuple[int, Any]
"""(line or row number from 1, the parsed value, or the RowError that says why it could not be parsed)."""


def raw_rows(source: str, split: str = "train") -> Iterator[NumberedRow]:
    """Yield the numbered rows of `source`: a .jsonl, .json or .parquet file, a dataset folder, or a hub id[:config].

    Text is UTF-8 whatever the locale; a byte-order mark, CRLF and blank lines are tolerated.
    Raises HeadwayError when the source does not exist or cannot be opened.
    """
    path = Path(source)
    if path.is_file():
        try:
            path.open("rb").close()
        except OSError as error:
            raise HeadwayError(f"cannot read {source!r}: {error.strerror}") from None
        if path.suffix == ".parquet":
            return _parquet(path)
        if path.suffix == ".json":
            return _json(path)
        return _jsonl(path)
    looks_local = path.suffix in _SUFFIXES or path.is_absolute() or source.startswith(".") or source.count("/") > 1
    if looks_local and not path.is_dir():
        raise HeadwayError(f"prompts file {source!r} does not exist; give a .jsonl, .json or .parquet file or a hub id")
    return _dataset(source, split)


def _jsonl(path: Path) -> Iterator[NumberedRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            line = line.removeprefix(b"\xef\xbb\xbf").strip()
            if line:
                yield number, _parse(line)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return RowError("not UTF-8")
    except (ValueError, RecursionError):
        return RowError("broken JSON")


def _json(path: Path) -> Iterator[NumberedRow]:
    """Rows of one JSON array (or an object whose `data` is one); a file that is really JSON lines is read as such."""
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        yield from _jsonl(path)
        return
    rows = value.get("data", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise HeadwayError(f"{path} holds a JSON {type(value).__name__}; give a list of rows, or one row per line")
    yield from enumerate(rows, 1)


def _parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        number = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        raise HeadwayError(f"{path} is no readable parquet file: {_first_line(error)}") from error


def _dataset(source: str, split: str) -> Iterator[NumberedRow]:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    name, _, config = source.partition(":")
    try:
        if (Path(source) / "dataset_info.json").is_file() or (Path(source) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(source)
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(name, config or None, split=split, streaming=True)
        yield from enumerate(rows, 1)
    except (OSError, ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError, HfHubHTTPError) as error:
        raise HeadwayError(
            f"cannot read {source!r} (split {split!r}) as a file, a dataset folder or a hub id: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

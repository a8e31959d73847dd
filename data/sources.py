"""Raw rows from files, folders and `datasets` ids: numbered, parsed, one at a time, never fatal for one broken row."""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

from headway.data.json_array import array_items
from headway.heads.common.errors import HeadwayError

KINDS = (".jsonl", ".jsonl.gz", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
_SPLITS = {"train", "test", "validation", "valid", "val", "dev", "eval"}
_LARGEST_CELL = 64 << 20
_ARROW_ROWS = 256


class RowError(ValueError):
    """Why one row cannot be used; the message is the reason that is counted."""


NumberedRow = tuple[int | str, Any]
"""(line or row number from 1, after the file's name in a folder; the parsed value, or the RowError that says why there is
none)."""


def raw_rows(source: str, split: str = "train") -> Iterator[NumberedRow]:
    """Yield the numbered rows of `source`: a file of one of KINDS, a folder of them or of a saved dataset, or a hub
    id[@revision][:config]. Rows are read as they are asked for, so a source may be larger than the memory.

    Of a folder whose files are named after splits, those of `split` are read. Text is UTF-8 whatever the locale; a
    byte-order mark, CRLF and blank lines are tolerated. Raises HeadwayError when the source cannot be opened.
    """
    path = Path(source).expanduser()
    if path.is_file():
        return _file(path)
    if path.is_dir():
        return _folder(path, split)
    looks_local = _kind(path) != "" or path.is_absolute() or source.startswith(".") or source.count("/") > 1
    if looks_local:
        raise HeadwayError(
            f"prompts file {source!r} does not exist; give a file ({', '.join(KINDS)}), a folder, or a hub id"
        )
    return _dataset(source, split)


def files_of(source: str, split: str = "train") -> list[Path]:
    """Return the local files that `raw_rows` reads, in order; none for a hub id."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    if _is_saved_dataset(path):
        return sorted(path.rglob("*.arrow"))
    files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) and not _is_hidden(file, path))
    named = {file: _SPLITS & set(re.split(r"[^a-z]+", str(file.relative_to(path)).lower())) for file in files}
    if any(named.values()):
        files = [file for file in files if split in named[file]]
        if not files:
            known = sorted(set().union(*named.values()))
            raise HeadwayError(
                f"folder {source!r} has no file of the split {split!r}; --split can be {', '.join(known)}"
            )
    return files


def _kind(path: Path) -> str:
    return next((kind for kind in KINDS if path.name.lower().endswith(kind)), "")


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file()


def _file(path: Path) -> Iterator[NumberedRow]:
    try:
        path.open("rb").close()
    except OSError as error:
        raise HeadwayError(f"cannot read {str(path)!r}: {error.strerror}") from None
    readers = {".parquet": _parquet, ".json": _json, ".csv": _table, ".tsv": _table}
    return readers.get(_kind(path), _jsonl)(path)


def _folder(path: Path, split: str) -> Iterator[NumberedRow]:
    if _is_saved_dataset(path):
        return _dataset(str(path), split)
    files = files_of(str(path), split)
    if not files:
        raise HeadwayError(f"folder {str(path)!r} holds no rows; it needs files of {', '.join(KINDS)}")
    return ((f"{file.relative_to(path)}:{number}", row) for file in files for number, row in _file(file))


def _jsonl(path: Path) -> Iterator[NumberedRow]:
    zipped = path.name.lower().endswith(".gz")
    try:
        with cast(BinaryIO, gzip.open(path)) if zipped else path.open("rb") as file:
            for number, line in enumerate(file, 1):
                line = line.removeprefix(b"\xef\xbb\xbf").strip()
                if line:
                    yield number, _parse(line)
    except (EOFError, zlib.error, OSError) as error:
        raise HeadwayError(f"{path} cannot be read to its end: {_first_line(error)}; copy it again") from error


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return RowError("not UTF-8")
    except (ValueError, RecursionError):
        return RowError("broken JSON")


def _json(path: Path) -> Iterator[NumberedRow]:
    """Rows of one JSON array, element by element; of an object, those in its `data`; of JSON lines, the lines."""
    with path.open("rb") as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if start == b"[":
        with path.open(encoding="utf-8-sig", errors="surrogateescape") as text:
            for number, (item, reason) in enumerate(array_items(text), 1):
                yield number, RowError(reason) if reason else item
        return
    with path.open("rb") as file:
        first = _parse(file.readline().removeprefix(b"\xef\xbb\xbf").strip())
        more = any(line.strip() for line in file)
    if more and not isinstance(first, RowError):
        yield from _jsonl(path)
        return
    try:
        value = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError):
        yield from _jsonl(path)
        return
    rows = value.get("data", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list):
        raise HeadwayError(f"{path} holds a JSON {type(value).__name__}; give a list of rows, or one row per line")
    yield from enumerate(rows, 1)


def _table(path: Path) -> Iterator[NumberedRow]:
    """Rows of a table under a header; their number is the line that they begin in."""
    before = csv.field_size_limit(_LARGEST_CELL)
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            header = file.readline()
            tab = _kind(path) == ".tsv" or ("\t" in header and "," not in header)
            delimiter = "\t" if tab else ";" if ";" in header and "," not in header else ","
            file.seek(0)
            yield from _table_rows(csv.reader(file, delimiter=delimiter))
    finally:
        csv.field_size_limit(before)


def _table_rows(reader: Any) -> Iterator[NumberedRow]:
    names: list[str] | None = None
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error:
            yield begin, RowError("broken CSV")
            continue
        if not cells:
            continue
        if names is None:
            names = cells
        elif len(cells) != len(names):
            yield begin, RowError(f"{'more' if len(cells) > len(names) else 'fewer'} cells than the header has")
        elif any("\udc80" <= char <= "\udcff" for cell in cells if not cell.isascii() for char in cell):
            yield begin, RowError("not UTF-8")
        else:
            yield begin, dict(zip(names, cells, strict=True))


def _parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        yield from enumerate(_arrow_rows(pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=_ARROW_ROWS)), 1)
    except (pyarrow.ArrowException, OSError) as error:
        raise HeadwayError(f"{path} is no readable parquet file: {_first_line(error)}") from error


def _arrow_rows(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the rows of Arrow tables; one with a value that Python cannot hold is the RowError that says so."""
    for batch in batches:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):  # somewhere: text that is not UTF-8, a time out of range
            rows = [_arrow_row(batch, at) for at in range(batch.num_rows)]
        yield from rows


def _arrow_row(batch: Any, at: int) -> dict[str, Any] | RowError:
    row = {}
    for column, name in enumerate(batch.schema.names):
        try:
            row[name] = batch.column(column)[at].as_py()
        except UnicodeDecodeError:
            return RowError("not UTF-8")
        except (ValueError, OverflowError):
            return RowError(f"a value in {repr(name)[:40]} that cannot be read")
    return row


def _undecoded(rows: Any) -> Any:
    """Return a dataset whose images and sounds stay as they are stored: they are not used, so one that is damaged costs its
    own row alone, and no library for them need be there."""
    import datasets

    for name, feature in (getattr(rows, "features", None) or {}).items():
        if isinstance(feature, datasets.Image | datasets.Audio | datasets.Video):
            rows = rows.cast_column(name, replace(feature, decode=False))
    return rows


def _dataset(source: str, split: str) -> Iterator[NumberedRow]:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    name, _, config = source.partition(":")
    name, _, revision = name.partition("@")
    try:
        if _is_saved_dataset(Path(source)):
            loaded = datasets.load_from_disk(source)
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(name, config or None, split=split, revision=revision or None, streaming=True)
        yield from enumerate(_undecoded(rows), 1)
    except (
        OSError,
        ValueError,
        KeyError,
        RuntimeError,
        ImportError,
        datasets.exceptions.DatasetsError,
        HfHubHTTPError,
    ) as error:
        raise HeadwayError(
            f"cannot read {source!r} (split {split!r}) as a file, a dataset folder or a hub id: {_first_line(error)}"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]

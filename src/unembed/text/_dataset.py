"""Documents from a Hugging Face dataset, streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unembed.results import InputError
from unembed.text._source import Document, Source, one_line, quiet_loggers

_LOGGERS = ("datasets", "huggingface_hub", "fsspec", "httpx")
_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text", ".arrow": "arrow"}


def read_dataset(name: str, config: str | None = None, *, split: str = "train", field: str = "text") -> Source:
    """Documents from a Hugging Face dataset, streamed: nothing is downloaded whole.

    Args:
        name: A dataset's id, or a local folder or file that `datasets.load_dataset` reads.
        config: The configuration, for a dataset that has several.
        split: The split.
        field: The column that holds the text.

    Raises:
        InputError: If the dataset, the configuration, the split or the column does not exist or cannot be reached.
            While iterating: if a row holds no string at `field`. Also if `datasets` is not installed.
    """
    return _Dataset(name, config, split, field)


class _Dataset:
    def __init__(self, name: str, config: str | None, split: str, field: str) -> None:
        self.arguments = (name, config, split)
        self.field = field
        self.name = " ".join(part for part in self.arguments if part)
        self._rows = _open_dataset(name, config, split)
        columns = self._rows.column_names
        if columns is not None and field not in columns:
            raise InputError(
                f"Dataset {self.name}: expected a column `{field}`, got {sorted(columns)}; name one as the field."
            )

    def __iter__(self) -> Iterator[Document]:
        rows = iter(self._rows)
        number = 0
        while True:
            try:
                with quiet_loggers(*_LOGGERS):
                    row = next(rows)
            except StopIteration:
                break
            except Exception as error:  # what a hub or a builder raises here is not one family
                raise InputError(f"Dataset {self.name}, row {number}: {one_line(error)}") from error
            text = row.get(self.field)
            if not isinstance(text, str):
                raise InputError(
                    f"Dataset {self.name}, row {number}: expected a string at `{self.field}`, "
                    f"got {type(text).__name__}."
                )
            if text.strip():
                yield Document(f"{self.name}#{number}", text)
            number += 1
        if not number:
            raise InputError(f"Dataset {self.name}: expected rows, got none.")

    def describe(self) -> dict[str, Any]:
        name, config, split = self.arguments
        about: dict[str, Any] = {"kind": "dataset", "name": name, "config": config, "split": split, "field": self.field}
        info = getattr(self._rows, "info", None)
        if info is not None and info.version is not None:
            about["version"] = str(info.version)
        return about


def _open_dataset(name: str, config: str | None, split: str) -> Any:
    """The dataset as an iterable of rows, which are dicts."""
    try:
        import datasets
    except ImportError as error:
        raise InputError('`read_dataset` needs datasets: pip install "unembed[hf]"') from error
    try:
        with quiet_loggers(*_LOGGERS):
            return _load(datasets, name, config, split)
    except InputError:
        raise
    except Exception as error:  # a wrong name, configuration or split, no network, a broken file: no common family
        raise InputError(f"Dataset {name}: cannot be opened ({one_line(error)}).") from error


def _load(datasets: Any, name: str, config: str | None, split: str) -> Any:
    path = Path(name).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        saved = datasets.load_from_disk(str(path))
        return saved[split] if isinstance(saved, datasets.DatasetDict) else saved
    if path.is_file():
        if path.suffix not in _BUILDERS:
            raise InputError(f"{path}: expected one of {sorted(_BUILDERS)}, got {path.suffix!r}.")
        return datasets.load_dataset(_BUILDERS[path.suffix], data_files={split: str(path)}, split=split, streaming=True)
    return datasets.load_dataset(str(path) if path.is_dir() else name, config, split=split, streaming=True)

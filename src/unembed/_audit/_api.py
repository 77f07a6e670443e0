"""`audit`, and the `Audit` it gives back."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from unembed._audit._head_run import HeadRun, own_head
from unembed._audit._run import MEASUREMENTS, Progress, Run
from unembed._version import __version__
from unembed.integrations import Dtype, resolve_device
from unembed.models import resolve_revision
from unembed.results import Finding, InputError, Record, Result
from unembed.text import check_documents, read_files, read_topics

DEMONSTRATION = Path(__file__).parents[1] / "assets" / "demonstration"


class Audit:
    """A finished audit.

    Args:
        record: Everything that was found, as data.
        resume: File with the sums of the run, removed once the audit is saved.
    """

    def __init__(self, record: Record, *, resume: Path | None = None) -> None:
        self.record = record
        self._resume = resume

    @property
    def results(self) -> dict[str, Result]:
        """Measurement name -> result."""
        return self.record.results

    @property
    def findings(self) -> list[Finding]:
        """All findings, the gravest first."""
        return self.record.findings

    def __repr__(self) -> str:
        model = self.record.model.get("source")
        return f"<Audit of {model}: {', '.join(self.results)}; {len(self.findings)} findings>"

    def save(self, folder: str | Path) -> Path:
        """Write `audit.json`, `tables.npz`, `tables/*.csv` and `report.html`: all of them or none.

        Raises:
            OSError: If the folder cannot be written.
        """
        from unembed import report

        self.record.save(folder, extra={"report.html": report.render(self.record)})
        if self._resume is not None:  # only now is the run on disk
            self._resume.unlink(missing_ok=True)
        return Path(folder)

    def _repr_html_(self) -> str:
        from html import escape

        from unembed import report

        page = escape(report.render(self.record, figures=False), quote=True)
        style = "width:100%;height:60em;border:0"
        return f'<iframe srcdoc="{page}" style="{style}" sandbox="allow-scripts allow-downloads"></iframe>'


def audit(
    source: str | Path | nn.Module | None = None,
    *,
    text: Any = None,
    tokenizer: Any = None,
    tokens: int = 8192,
    checks: Sequence[str] | None = None,
    context: int = 512,
    device: str = "cpu",
    dtype: Dtype = "float32",
    seed: int = 0,
    norm: str | None = None,
    revision: str | None = None,
    resume: str | Path | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Measure the output layer of a model.

    Args:
        source: Hugging Face folder, hub id, GGUF file, or a model in memory; the demonstration model when None. Where
            the output layer of a model in memory is a head of `unembed.heads` that is no plain matrix, `gradient` is
            measured through its Jacobian at about 64 sampled predictions, and the others do not apply.
        text: Paths of text files, or documents (`text.Document`) that can be iterated again; the English of the
            standard library's `pydoc_data.topics` when None.
        tokenizer: Needed with a model in memory.
        tokens: Predictions to measure on.
        checks: Names of the measurements to make; all when None. `["spectrum"]` reads the weights only.
        context: Longest window of a document, in tokens.
        device: `cpu`, `cuda`, `cuda:1`, `mps` or `auto`. A model in memory stays where it is.
        dtype: In what the body runs: `float32`, `bfloat16`, `float16`, `float64`. Measurements use float32 or wider.
        seed: Seed of the document order, the bootstrap and the sketch.
        norm: Kind of the final norm where the model's family is unknown: `rms`, `rms1p`, `layer`, `layer1p` or `none`.
        revision: Branch, tag or commit of a hub model.
        resume: File that keeps the sums so far, written about once a minute and on an interrupt, removed by
            `Audit.save`. If it exists and belongs to the same audit, the measuring goes on from there.
        progress: Called with a phase, the work done and the work in all.

    Raises:
        InputError: If something given cannot be used; the message is one line that says what would do.
        IntegrityError: If the head fails a check, so that no number would be worth printing.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    _check_numbers(tokens=tokens, context=context, seed=seed)
    if dtype not in get_args(Dtype):
        raise InputError(f"`dtype` must be one of {', '.join(get_args(Dtype))}, got {dtype!r}.")
    kind = HeadRun if own_head(source) is not None else Run
    run = kind(
        source=DEMONSTRATION if source is None else source,
        text=_documents(text),
        tokenizer=tokenizer,
        tokens=tokens,
        checks=_chosen(checks),
        context=context,
        device=device,
        dtype=dtype,
        seed=seed,
        revision=resolve_revision(source, revision) or revision,
        norm=norm,
        resume=None if resume is None else Path(resume),
        say=progress or (lambda _phase, _done, _total: None),
    )
    record = run.measure()
    record.provenance["versions"] = _versions()
    seconds = {"total": round(time.perf_counter() - clock, 3), **run.phases}
    record.timing = {"started": started.isoformat(timespec="seconds"), "seconds": seconds}
    return Audit(record, resume=run.resume)


def check_options(*, checks: Sequence[str] | None, device: str) -> None:
    """Refuse names of measurements and devices that are none, before anything is read.

    Raises:
        InputError: If one is unknown or not there.
    """
    _chosen(checks)
    resolve_device(device)


def _check_numbers(*, tokens: int, context: int, seed: int) -> None:
    for name, value, least in (("tokens", tokens, 1), ("context", context, 1), ("seed", seed, 0)):
        if not isinstance(value, int):
            raise InputError(f"`{name}` must be a whole number, got {value!r}.")
        if value < least:
            raise InputError(f"`{name}` must be at least {least}, got {value}.")


def _chosen(checks: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the measurements in the order of the report."""
    if checks is None:
        return tuple(MEASUREMENTS)
    checks = [checks] if isinstance(checks, str) else checks
    unknown = [name for name in checks if name not in MEASUREMENTS]
    if unknown or not checks:
        raise InputError(f"`checks` takes names from {', '.join(MEASUREMENTS)}; got {', '.join(unknown) or 'none'}.")
    return tuple(name for name in MEASUREMENTS if name in checks)


def _documents(source: Any) -> Any:
    """The documents to measure on."""
    if source is None:
        return read_topics()
    if isinstance(source, str | Path):
        return read_files([source])
    if isinstance(source, Sequence) and source and all(isinstance(item, str | Path) for item in source):
        return read_files(source)
    check_documents(source)
    return source


def _versions() -> dict[str, str]:
    found = {"unembed": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("numpy", "safetensors", "transformers", "tokenizers", "gguf"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

"""`unembed audit`: measure the output layer of models and write a report for each."""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unembed.cli._options import whole
from unembed.cli._output import BAD, drop_output, say

if TYPE_CHECKING:
    from unembed.results import Record

_CHECKS = "spectrum,logprob_rank,gradient,coefficients,saturation"
_NEVER = "never"
_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "audit",
        help="measure the output layer of a model and write a report",
        description="Measure the output layer of each MODEL: is it loaded right, what rank has it, what part of the "
        "gradient passes. Writes report.html, audit.json and the tables.",
        usage="unembed audit [MODEL ...] [--text FILE ... | --dataset NAME] [options]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="folder, hub id or GGUF file; the demonstration model"
    )
    _add_text(parser)
    _add_measuring(parser)
    _add_outcome(parser)
    parser.set_defaults(run=functools.partial(run, parser), parser=parser)


def _add_text(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="plain text or JSONL (field `text`) to measure on"
    )
    where.add_argument("--dataset", metavar="NAME", help="Hugging Face dataset to stream, NAME or NAME:CONFIG")
    parser.add_argument("--split", default="train", help="split of the dataset (train)")
    parser.add_argument(
        "--field", default="text", help="field of a JSONL line or dataset row that holds the text (text)"
    )


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=whole(1), default=8192, metavar="N", help="predictions to measure on (8192)")
    parser.add_argument(
        "--context",
        type=whole(1),
        default=512,
        metavar="N",
        help="longest window of a document, in predictions (512); at most max(64, TOKENS // 32), so that few --tokens "
        "still see many documents",
    )
    parser.add_argument("--checks", default=_CHECKS, metavar="A,B", help=f"measurements to make ({_CHECKS})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps or auto (cpu)")
    parser.add_argument("--dtype", default="float32", choices=_DTYPES, help="in what the body runs (float32)")
    parser.add_argument(
        "--norm",
        choices=["rms", "rms1p", "layer", "layer1p", "none"],
        help="kind of the final norm, where the model's family is unknown",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument(
        "--seed",
        type=whole(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="seed of document order, bootstrap and sketches (0)",
    )


def _add_outcome(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (out/NAME)")
    parser.add_argument(
        "--fail-on",
        choices=[_NEVER, "info", "warning", "error"],
        default=_NEVER,
        metavar="SEVERITY",
        help="exit with 1 on a finding of this severity or worse: info, warning, error (never); a warning of an "
        "integrity check counts as a warning",
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the sums so far in DIR, and go on from them after an interrupt"
    )


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Audit every model; 1 if a finding reaches `--fail-on`, 2 if a model could not be audited."""
    from unembed import report
    from unembed._audit import check_options
    from unembed.cli._folders import check_writable, folders
    from unembed.cli._progress import Progress
    from unembed.results import InputError

    report.check_installed()
    worst = 0
    failed: list[str] = []
    documents = _documents(options)
    check_options(checks=_checks(options), device=options.device)  # what is wrong for all models is said once
    planned = folders(options.models, options.out)
    for _, folder in planned:
        check_writable(folder)
    for model, folder in planned:
        kept = folder / ".unembed-resume" if options.resume else None
        _announce_hub(model)
        try:
            with Progress() as progress:
                audit = _audit(model, options, documents, kept, progress)
            audit.record.provenance["command"] = _command(parser, options, model, folder)
            audit.save(folder)
        except KeyboardInterrupt:
            if kept is None:
                raise
            left = f"the sums so far are kept in {kept}; the same command goes on from them"
            raise KeyboardInterrupt(left if kept.exists() else "nothing was kept yet") from None
        except InputError as error:
            if len(planned) == 1:
                raise
            say(str(error))
            failed.append(str(model))
            continue
        _show(audit.record, folder)
        worst = max(worst, _reaches(audit.record, options.fail_on))
    if failed:
        say(f"{len(failed)} of {len(planned)} models could not be audited: {', '.join(failed)}")
        return BAD
    return worst


def _announce_hub(model: str | None) -> None:
    """Say on a terminal that a name is looked up on the hub: a mistyped path looks like one, and answers take time."""
    if model is None or not sys.stderr.isatty():
        return
    from unembed.models import is_on_hub

    if is_on_hub(model):
        say(f"{model}: no such path here, asking the Hugging Face hub")


def _checks(options: argparse.Namespace) -> list[str]:
    return [name.strip() for name in options.checks.split(",") if name.strip()]


def _documents(options: argparse.Namespace) -> Any:
    from unembed.text import read_dataset, read_files

    if options.text:
        return read_files(options.text, field=options.field)
    if options.dataset:
        name, _, config = options.dataset.partition(":")
        return read_dataset(name, config or None, split=options.split, field=options.field)
    return None


def _audit(
    model: str | None,
    options: argparse.Namespace,
    documents: Any,
    kept: Path | None,
    progress: Any,
) -> Any:
    import unembed

    return unembed.audit(
        model,
        text=documents,
        tokens=options.tokens,
        checks=_checks(options),
        context=options.context,
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
        norm=options.norm,
        revision=options.revision,
        resume=kept,
        progress=progress,
    )


def _show(record: Record, folder: Path) -> None:
    """The summary, to whoever still reads: the files are written, so a closed pipe is no failure."""
    from unembed.cli._summary import print_summary

    try:
        with contextlib.suppress(SystemExit):  # rich's own answer to a closed pipe
            print_summary(record, folder)
    except BrokenPipeError:
        drop_output()


def _command(parser: argparse.ArgumentParser, options: argparse.Namespace, model: str | None, folder: Path) -> str:
    """The command line that repeats the audit of this one model: what differs from the defaults."""
    words = ["unembed", "audit", *([model] if model else [])]
    given = vars(options) | ({"out": folder} if len(options.models) > 1 else {})
    for name, value in given.items():
        if name in ("models", "parser", "run") or value == parser.get_default(name):
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, list):
            words += [option, *map(str, value)]
        elif value is True:
            words.append(option)
        else:  # a value that looks like an option stays attached to its own
            words += [f"{option}={value}"] if str(value).startswith("-") else [option, str(value)]
    return shlex.join(words)


def _reaches(record: Record, severity: str) -> int:
    from unembed.results import SEVERITIES

    found = [finding.severity for finding in record.findings]
    found += ["warning" for check in record.integrity if check.status == "warning"]
    if severity == _NEVER:
        return 0
    return int(any(SEVERITIES.index(one) >= SEVERITIES.index(severity) for one in found))

"""`unembed audit`: measure the output layer of models and write a report for each."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unembed.results import Record

_CHECKS = "spectrum,logprob_rank,gradient,coefficients,saturation"
_NEVER = "never"


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
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", help="plain text or JSONL (field `text`) to measure on"
    )
    where.add_argument("--dataset", metavar="NAME", help="Hugging Face dataset to stream, NAME or NAME:CONFIG")
    parser.add_argument("--split", default="train", help="split of the dataset (train)")
    parser.add_argument(
        "--field", default="text", help="field of a JSONL line or dataset row that holds the text (text)"
    )
    parser.add_argument("--tokens", type=int, default=8192, metavar="N", help="predictions to measure on (8192)")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="longest window, in tokens (512)")
    parser.add_argument("--checks", default=_CHECKS, metavar="A,B", help=f"measurements to make ({_CHECKS})")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the results (out/NAME)")
    parser.add_argument(
        "--fail-on",
        choices=[_NEVER, "info", "warning", "error"],
        default=_NEVER,
        metavar="SEVERITY",
        help="exit with 1 on a finding of this severity or worse: info, warning, error (never)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps or auto (cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16", "float64"],
        help="in what the body runs (float32)",
    )
    parser.add_argument(
        "--norm",
        choices=["rms", "rms1p", "layer", "layer1p", "none"],
        help="kind of the final norm, where the model's family is unknown",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--seed", type=int, default=0, help="seed of document order, bootstrap and sketches (0)")
    parser.add_argument(
        "--resume", action="store_true", help="keep the sums so far in DIR, and go on from them after an interrupt"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Audit every model; 1 if a finding reaches `--fail-on`."""
    from unembed.cli._progress import Progress
    from unembed.cli._summary import print_summary

    worst = 0
    for model in options.models or [None]:
        try:
            with Progress() as progress:
                audit = _audit(model, options, progress)
        except KeyboardInterrupt:
            if options.resume:
                raise KeyboardInterrupt("the sums so far are kept, the same command goes on from them") from None
            raise
        folder = _folder(model, options)
        audit.record.provenance["command"] = _command(model, options)
        audit.save(folder)
        print_summary(audit.record, folder)
        worst = max(worst, _reaches(audit.record, options.fail_on))
    return worst


def _audit(model: str | None, options: argparse.Namespace, progress: Any) -> Any:
    import unembed
    from unembed.text import read_dataset, read_files

    documents = None
    if options.text:
        documents = read_files(options.text, field=options.field)
    elif options.dataset:
        name, _, config = options.dataset.partition(":")
        documents = read_dataset(name, config or None, split=options.split, field=options.field)
    return unembed.audit(
        model,
        text=documents,
        tokens=options.tokens,
        checks=[name.strip() for name in options.checks.split(",") if name.strip()],
        context=options.context,
        device=options.device,
        dtype=options.dtype,
        seed=options.seed,
        norm=options.norm,
        revision=options.revision,
        resume=_folder(model, options) / ".unembed-resume" if options.resume else None,
        progress=progress,
    )


def _folder(model: str | None, options: argparse.Namespace) -> Path:
    """`--out`, with a folder a model below it when there are several."""
    from unembed.results import safe_name

    name = (
        "demonstration" if model is None else safe_name(Path(model).resolve().name if Path(model).exists() else model)
    )
    if options.out is None:
        return Path("out") / name
    return options.out / name if len(options.models) > 1 else options.out


def _command(model: str | None, options: argparse.Namespace) -> str:
    """The command line that repeats this audit."""
    given = [argument for argument in options.arguments if argument not in options.models]
    return shlex.join(["unembed", given[0], *([model] if model else []), *given[1:]])


def _reaches(record: Record, severity: str) -> int:
    from unembed.results import SEVERITIES

    worst = record.worst()
    if severity == _NEVER or worst is None:
        return 0
    return int(SEVERITIES.index(worst) >= SEVERITIES.index(severity))

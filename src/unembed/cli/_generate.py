"""`unembed generate`: continue prompts by any strategy; `--study` measures them all (in `_study`)."""

from __future__ import annotations

import argparse
import functools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unembed.cli import _study
from unembed.cli._options import real, whole, with_flags
from unembed.cli._output import say

if TYPE_CHECKING:
    from unembed.experiments import Decoder

STRATEGIES = ("greedy", "sample", "beam", "contrastive", "stochastic-beam", "speculative")
ORDERS = ("unembed", "transformers", "vllm", "llama.cpp", "sglang")
DEMONSTRATION = "demo"
_DTYPES = ("float32", "bfloat16", "float16", "float64", "auto")
# Options of the command that are those of `Decoder`; with any of the first ones `sample` is the default.
_LIMITS = ("top_k", "top_p", "min_p", "typical_p", "epsilon", "eta", "top_n_sigma", "xtc", "xtc_probability")
_DRAWING = ("temperature", *_LIMITS, "order", "returns")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram", "dry")
_DECODER = (*_DRAWING, *_PENALTIES, "beams", "length_penalty", "alpha", "lookahead")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="continue prompts with a model, by any strategy; --study measures all of them",
        description="Continue each PROMPT. MODEL is a folder, hub id or GGUF file; `demo` is the demonstration model. "
        "With --study, continue one prompt set by every strategy and write a report.",
        usage="unembed generate MODEL PROMPT ... [options]\n       unembed generate MODEL --study [options]",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="folder, hub id or GGUF file; `demo` is the demonstration model")
    parser.add_argument("words", nargs="*", metavar="PROMPT", help="text to continue, as it is: no chat template")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="prompts from a file: one a line, or JSONL (field `text`)"
    )
    parser.add_argument("--field", default="text", help="field of a JSONL line that holds the prompt (text)")
    _add_choice(parser)
    _add_filters(parser)
    _add_running(parser)
    _study.add_to(parser)
    parser.set_defaults(run=functools.partial(run, parser), parser=parser, late="words")


def _add_choice(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("strategy")
    group.add_argument(
        "--strategy", choices=STRATEGIES, help="how tokens are chosen (greedy; sample with an option of sampling)"
    )
    group.add_argument("--max-new-tokens", type=whole(1), default=64, metavar="N", help="tokens at most (64)")
    group.add_argument(
        "--stop", action="append", default=[], type=_some, metavar="TEXT", help="end before this; repeatable"
    )
    group.add_argument("--seed", type=whole(0, 2**31 - 1), default=0, metavar="N", help="seed of all draws (0)")
    group.add_argument("--beams", type=whole(1), metavar="N", help="hypotheses of beam and stochastic-beam (4)")
    group.add_argument("--length-penalty", type=real(-20, 20), metavar="P", help="beams compare log p / length^P (1)")
    group.add_argument("--returns", type=whole(1), metavar="N", help="sequences a prompt, of beam or sample (1)")
    group.add_argument("--alpha", type=real(0, 1), metavar="A", help="degeneration penalty of contrastive (0.6)")
    group.add_argument("--draft", metavar="MODEL", help="draft model of speculative")
    group.add_argument("--lookahead", type=whole(1), metavar="N", help="tokens that the draft writes at a time (4)")


def _some(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected a text, got an empty one")
    return text


def _add_filters(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("filters, in the order of --order")
    group.add_argument("--temperature", type=real(0), metavar="T", help="0 is greedy (1)")
    group.add_argument("--top-k", type=whole(1), metavar="K", help="keep the K best; candidates of contrastive (4)")
    group.add_argument("--top-p", type=real(0, 1), metavar="P", help="keep the best ones of mass P")
    group.add_argument("--min-p", type=real(0, 1), metavar="P", help="keep what has P times the best probability")
    group.add_argument("--typical-p", type=real(0, 1), metavar="P", help="keep those nearest to the entropy, of mass P")
    group.add_argument("--epsilon", type=real(0, 1), metavar="P", help="keep what has this probability")
    group.add_argument("--eta", type=real(0, 1), metavar="P", help="keep by a probability that falls with the entropy")
    group.add_argument("--top-n-sigma", type=real(0), metavar="N", help="keep N standard deviations below the best")
    group.add_argument("--xtc", type=real(0, 1), metavar="P", help="at times drop what has P, but for the least likely")
    group.add_argument("--xtc-probability", type=real(0, 1), metavar="P", help="how often --xtc does so (0.5)")
    group.add_argument("--repetition-penalty", type=real(1e-6), metavar="X", help="above 1 makes old tokens rarer")
    group.add_argument("--presence-penalty", type=real(), metavar="X", help="taken from scores of what was written")
    group.add_argument("--frequency-penalty", type=real(), metavar="X", help="the same, for each time")
    group.add_argument("--no-repeat-ngram", type=whole(1), metavar="N", help="let no run of N tokens come twice")
    group.add_argument(
        "--dry", type=real(0), metavar="X", help="taken from what prolongs a repeat, more the longer it is"
    )
    group.add_argument("--order", choices=ORDERS, help="whose order and definitions of filters (unembed)")


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps or auto (cpu)")
    group.add_argument("--dtype", default="float32", choices=_DTYPES, help="in what the model runs (float32)")
    group.add_argument("--revision", help="branch, tag or commit of a hub model")
    group.add_argument("--json", type=Path, metavar="FILE", help="write tokens, log-probabilities and settings too")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Continue the prompts, or run the study."""
    from unembed.results import InputError

    if options.study:
        idle = [
            name
            for name in (*_DECODER, "strategy", "draft", "stop", "json", "max_new_tokens")
            if _set(parser, options, name)
        ]
        if idle or options.words:
            what = f"--{idle[0].replace('_', '-')}" if idle else "PROMPT (give --prompts FILE)"
            raise InputError(f"--study runs every strategy and takes no {what}.")
        return _study.run(options, lambda: _opened(options.model, options))
    idle = [name for name in _study.OPTIONS if _set(parser, options, name)]
    if idle:
        raise InputError(f"--{idle[0].replace('_', '-')} belongs to --study.")
    return _generate(options)


def _generate(options: argparse.Namespace) -> int:
    from unembed.cli import _continue
    from unembed.cli._folders import check_writable
    from unembed.cli._prompts import read_prompts
    from unembed.results import InputError

    decoder = _decoder(options)
    prompts = [*options.words, *(text for _, text in read_prompts(options.prompts, options.field))]
    if not prompts:
        raise InputError("Expected a PROMPT or --prompts FILE, got neither.")
    if (options.draft is not None) != (decoder.strategy == "speculative"):
        what = "needs --draft MODEL" if options.draft is None else "takes no --draft"
        raise InputError(f"--strategy {decoder.strategy} {what}.")
    if options.json is not None:
        if options.json.is_dir():
            raise InputError(f"--json {options.json}: expected a file, got a folder.")
        check_writable(options.json.parent, "--json")
    if sys.stderr.isatty():
        say(f"opening {options.model}")
    model, tokenizer = _opened(options.model, options)
    draft = None if options.draft is None else _opened(options.draft, options)[0]
    rows = _continue.written(model, tokenizer, prompts, decoder, options, draft=draft)
    if options.json is not None:
        _continue.save(options, decoder, rows)
    return 0


def _decoder(options: argparse.Namespace) -> Decoder:
    from unembed.experiments import Decoder
    from unembed.results import InputError

    given = {name: getattr(options, name) for name in _DECODER}
    strategy = options.strategy
    if strategy is None:
        strategy = "sample" if any(given[name] is not None for name in _DRAWING) else "greedy"
    try:
        decoder = Decoder(strategy, **given)
        if strategy != "speculative":
            decoder.arguments()  # what is wrong is told before the model is opened
        return decoder
    except InputError as error:
        raise InputError(with_flags(str(error), vars(options))) from None


def _opened(source: str, options: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer."""
    from unembed._audit._api import DEMONSTRATION as FOLDER
    from unembed.integrations import open_model

    revision = options.revision if source == options.model else None
    where = FOLDER if source == DEMONSTRATION else source
    return open_model(where, revision=revision, device=options.device, dtype=options.dtype)


def _set(parser: argparse.ArgumentParser, options: argparse.Namespace, name: str) -> bool:
    """Whether an option is not as it was."""
    return getattr(options, name) != parser.get_default(name)

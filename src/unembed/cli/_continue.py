"""Continue prompts and show the texts as they come; all that is known of them as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from itertools import chain
from typing import TYPE_CHECKING, Any

from unembed.cli._options import with_flags
from unembed.cli._output import legible, printable

if TYPE_CHECKING:
    from unembed.decoding import Event, Generation
    from unembed.experiments import Decoder

_DRAW = 16  # bits of a seed that count prompts; 16 further ones count draws of one prompt
_BATCH = 8  # prompts that go together; their text does not depend on it, beyond rounding of scores


def written(
    model: Any, tokenizer: Any, prompts: list[str], decoder: Decoder, options: argparse.Namespace, *, draft: Any
) -> list[dict[str, Any]]:
    """Continue the prompts, some at a time, and show the texts; what `save` keeps of each.

    Raises:
        InputError: If a prompt has no token, or an option does not fit the model.
    """
    from unembed.cli._prompts import prompt_ids
    from unembed.decoding import generate
    from unembed.experiments import row_seeds
    from unembed.results import InputError

    try:
        arguments = decoder.arguments(draft=draft)
    except InputError as error:
        raise InputError(with_flags(str(error), vars(options))) from None
    ids = [prompt_ids(tokenizer, prompt, place) for place, prompt in enumerate(prompts, 1)]
    seeds = row_seeds(options.seed, range(len(prompts)))
    alone = len(prompts) == 1
    draws = decoder.returns or 1 if decoder.strategy == "sample" else 1
    several = decoder.strategy == "stochastic-beam" or (decoder.returns or 1) > 1
    rows: list[dict[str, Any]] = []
    batch = max(1, _BATCH // draws)
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        try:
            found = generate(
                model,
                [one for one in ids[part] for _ in range(draws)],
                max_new_tokens=options.max_new_tokens,
                tokenizer=tokenizer,
                stop=tuple(options.stop),
                seeds=[one + (draw << _DRAW) for one in seeds[part] for draw in range(draws)],
                on_token=_tell if alone and not several else None,
                **arguments,
            )
        except ValueError as error:  # what only the model can say: an id it has no row for, a vocabulary that differs
            raise InputError(with_flags(str(error), vars(options))) from error
        rows_of = _sequences(found)
        own = [list(chain(*rows_of[place : place + draws])) for place in range(0, len(rows_of), draws)]
        about = zip(prompts[part], ids[part], seeds[part], own, strict=True)
        rows += [dict(zip(("prompt", "prompt_ids", "seed", "sequences"), one, strict=True)) for one in about]
        if alone and not several:
            sys.stdout.write("\n")
        else:
            _show(rows[start:], start, alone=alone)
    return rows


def save(options: argparse.Namespace, decoder: Decoder, rows: list[dict[str, Any]]) -> None:
    """Write the JSON file, whole or not at all."""
    from unembed._version import __version__
    from unembed.results import plain, write_whole

    content = {
        "schema_version": 1,
        "unembed": __version__,
        "model": options.model,
        "draft": options.draft,
        "dtype": options.dtype,
        "settings": decoder.given(),
        "max_new_tokens": options.max_new_tokens,
        "stop": options.stop,
        "seed": options.seed,
        "prompts": rows,
    }
    with write_whole(options.json) as file:
        json.dump(plain(content), file, indent=2, allow_nan=False)
        file.write("\n")


def _tell(event: Event) -> None:
    """Write the text of one prompt that can no longer change."""
    if event.text:
        sys.stdout.write(legible(event.text))
        sys.stdout.flush()


def _show(rows: list[dict[str, Any]], start: int, *, alone: bool) -> None:
    """Texts of several prompts or sequences, each under a line that names it."""
    from unembed.text import visible

    for number, row in enumerate(rows, start + 1):
        for rank, one in enumerate(row["sequences"], 1):
            which = [] if alone else [f"{number} {visible(row['prompt'], 50)}"]
            if len(row["sequences"]) > 1:
                which.append(f"sequence {rank}, score {one['score']:.4f}")
            if which:
                sys.stdout.write(f"== {printable(', '.join(which))}\n")
            sys.stdout.write(f"{legible(one['text'])}\n")
    sys.stdout.flush()


def _sequences(found: Generation) -> list[list[dict[str, Any]]]:
    """What was written for each prompt, as JSON types."""
    rows, perturbed = [], found.extra.get("perturbed_log_probs")
    for b, finishes in enumerate(found.finish):
        own = []
        for r, finish in enumerate(finishes):
            count = int(found.lengths[b, r])
            one = {
                "text": found.texts[b][r] if found.texts is not None else "",
                "finish": finish,
                "score": float(found.scores[b, r]),
                "tokens": found.tokens[b, r, :count].tolist(),
                "log_probs": found.log_probs[b, r, :count].tolist(),
                "drawn_log_probs": found.drawn_log_probs[b, r, :count].tolist(),
            }
            if perturbed is not None:
                one["perturbed_log_prob"] = float(perturbed[b, r])  # what stochastic beams are in the order of
            own.append(one)
        rows.append(own)
    return rows

"""The degeneration of likelihood maximisation, measured: one prompt set, continued by people and by every strategy.

Shapes: P prompts, T tokens of a continuation, V vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed import decoding
from unembed.decoding._models import ends_of, evaluating
from unembed.decoding.metrics import text_metrics
from unembed.experiments import _degeneration_files as files
from unembed.experiments._decoder import Decoder, row_seeds
from unembed.results import InputError, bootstrap_interval, plain
from unembed.text import Document, check_documents, read_topics, require_document

HUMAN = "human"
_BLOCK = 16  # tokens whose log-probabilities are averaged, for the curve over positions
_SCORES = 1 << 25  # of the human text held at once


@dataclass(frozen=True)
class StudyConfig:
    """What is measured.

    Args:
        count: Prompts at most, one a document.
        prompt_tokens: Tokens of each prompt.
        tokens: Tokens of each continuation.
        batch: Prompts that go together; the text does not depend on it, beyond rounding of scores.
        seed: Of all draws and of the intervals.
    """

    count: int = 64
    prompt_tokens: int = 32
    tokens: int = 128
    batch: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = {"seed": 0, "tokens": 2}.get(name, 1)
            if not isinstance(value, int) or value < least:
                raise InputError(f"`{name}` must be a whole number of at least {least}, got {value!r}.")


class _Beginnings(NamedTuple):
    """Names of documents, and their first tokens: prompt and continuation."""

    names: list[str]
    ids: Int[Tensor, "P n"]


def study_decoders() -> dict[str, Decoder]:
    """The strategies of the study, from those that look for likely text to those that draw."""
    return {
        "greedy": Decoder(),
        "beam 4": Decoder("beam", beams=4),
        "greedy, repetition penalty 1.2": Decoder(repetition_penalty=1.2),
        "contrastive k=4 a=0.6": Decoder("contrastive", top_k=4, alpha=0.6),
        "sample T=0.7": Decoder("sample", temperature=0.7),
        "top-n-sigma 1": Decoder("sample", top_n_sigma=1.0),
        "min-p 0.1": Decoder("sample", min_p=0.1),
        "top-k 40": Decoder("sample", top_k=40),
        "top-p 0.9": Decoder("sample", top_p=0.9),
        "typical 0.9": Decoder("sample", typical_p=0.9),
        "eta 0.002": Decoder("sample", eta=0.002),
        "sample T=1": Decoder("sample", temperature=1.0),
    }


def degeneration(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document] | None = None,
    *,
    config: StudyConfig | None = None,
    decoders: Mapping[str, Decoder] | None = None,
    source: str = "",
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Continue the beginnings of documents by each strategy, and measure all texts beside what people wrote there.

    A prompt is the beginning of a document; the human row is what follows it. All continuations have the same number
    of tokens, because repetition, diversity and Zipf's coefficient depend on it: the ids that end a text are excluded,
    as the documents go on too. All strategies that draw have the same seeds.

    Args:
        model: A causal language model of transformers, or one with its conventions.
        tokenizer: Its tokenizer.
        documents: With enough tokens each, others are passed over; the topics of Python's language reference when None.
        config: Numbers of the study.
        decoders: Strategies by name; `study_decoders()` when None.
        source: The model's name, for the record.
        folder: Where to write `study.json`, `study.csv`, `study.md` and the continuations, anew after each strategy.
        resume: Take over the strategies that are in `folder` already.
        progress: Called with a strategy, the strategies done and all of them.

    Returns:
        What is in `study.json`; its keys are in `_degeneration_files`.

    Raises:
        InputError: If no document is long enough, the model has fewer positions, or `folder` holds another study.
        ImportError: If sacrebleu is not installed.
    """
    config = StudyConfig() if config is None else config
    decoders = study_decoders() if decoders is None else dict(decoders)
    if HUMAN in decoders:
        raise InputError(f"`decoders` must not use the name {HUMAN}, which is that of the documents.")
    _check_room(model, config)
    documents = read_topics() if documents is None else documents
    texts = _beginnings(tokenizer, documents, config)
    about = files.described(
        model, documents, config, source=source, prompts=len(texts.ids), prompts_sha256=_sha256(texts.ids)
    )
    kept = files.kept(Path(folder), about) if resume and folder is not None else {}
    wanted: list[tuple[str, Decoder | None]] = [(HUMAN, None), *decoders.items()]
    rows: list[dict[str, Any]] = []
    for place, (name, decoder) in enumerate(wanted):
        settings = None if decoder is None else decoder.given()
        row = kept.pop(name, None)
        if row is not None and row["settings"] != settings:
            row = None
        if progress is not None:
            progress(name if row is None else f"{name} (kept)", place, len(wanted))
        written: list[dict[str, Any]] | None = None
        if row is None:
            row, written = _row(model, tokenizer, texts, decoder, config)
            row = plain({"name": name, "settings": settings, **row})
        rows.append(row)
        if folder is not None:
            later = [*rows, *(kept[other] for other in decoders if other in kept)]  # an interrupt must not lose them
            files.save(about | {"rows": later}, Path(folder), name, written)
    if progress is not None:
        progress("", len(wanted), len(wanted))
    return about | {"rows": rows}


def _row(
    model: Any, tokenizer: Any, beginnings: _Beginnings, decoder: Decoder | None, config: StudyConfig
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The measurements of one strategy, or of the documents; and its continuations."""
    started = time.perf_counter()
    prompts, human = beginnings.ids.split([config.prompt_tokens, config.tokens], 1)
    if decoder is None:
        tokens, log_probs = human, _log_probs(model, prompts, human)
    else:
        tokens, log_probs = _continued(model, prompts, decoder, config)
    seconds = time.perf_counter() - started
    texts = [_decoded(tokenizer, row) for row in tokens.tolist()]
    found = text_metrics(
        tokens.tolist(), log_probs=log_probs.tolist(), texts=texts, orders=(1, 2, 3, 4), seed=config.seed
    )
    row = {
        "metrics": {name: asdict(one) for name, one in found.items()},
        "positions": _by_position(log_probs.double().numpy(), config.seed),
        "seconds": round(seconds, 3),
    }
    continuations = [
        {"prompt": name, "text": text, "tokens": own, "log_probs": [float(f"{one:.6g}") for one in said]}
        for name, text, own, said in zip(beginnings.names, texts, tokens.tolist(), log_probs.tolist(), strict=True)
    ]
    return row, continuations


def _continued(
    model: Any, prompts: Int[Tensor, "P n"], decoder: Decoder, config: StudyConfig
) -> tuple[Int[Tensor, "P T"], Float[Tensor, "P T"]]:
    """Tokens of a strategy, and their log-probabilities under the model as it is."""
    arguments = decoder.arguments()
    banned = ends_of(model, None)
    if banned:
        arguments["filters"] = [decoding.BannedIds(banned), *arguments.get("filters", ())]
    found = []
    for start in range(0, len(prompts), config.batch):
        part = prompts[start : start + config.batch].to(model.device)
        seeds = row_seeds(config.seed, range(start, start + len(part)))
        found.append(decoding.generate(model, part, max_new_tokens=config.tokens, eos_ids=(), seeds=seeds, **arguments))
    tokens = torch.cat([one.tokens[:, 0].cpu() for one in found])
    return tokens, torch.cat([one.log_probs[:, 0].cpu() for one in found])


@torch.no_grad()
def _log_probs(model: Any, prompts: Int[Tensor, "P n"], human: Int[Tensor, "P T"]) -> Float[Tensor, "P T"]:
    """Log-probability of each token that follows the prompts."""
    scorer, found = decoding.CachedScorer(model), []
    rows = max(1, _SCORES // (human.shape[1] * model.config.get_text_config().vocab_size))
    with evaluating(model):
        for part, text in zip(prompts.split(rows), human.split(rows), strict=True):
            read, said = part.to(model.device), text.to(model.device)
            first = scorer.start(read, torch.ones_like(read, dtype=torch.bool))[:, None]
            scores = torch.cat([first, scorer.extend(said[:, :-1])], 1).float()
            own = scores.gather(-1, said[..., None]).squeeze(-1)
            found.append((own - scores.logsumexp(-1)).cpu())
    return torch.cat(found)


def _beginnings(tokenizer: Any, documents: Iterable[Document], config: StudyConfig) -> _Beginnings:
    """Those of the documents that are long enough, in their order."""
    check_documents(documents)
    need = config.prompt_tokens + config.tokens
    names, found, seen = [], [], 0
    for document in documents:
        if len(found) == config.count:
            break
        seen += 1
        text = require_document(document).text.encode("utf-8", "replace").decode("utf-8")
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(ids) > need:  # one more than is used: the last may be a special token
            names.append(document.id)
            found.append(ids[:need])
    if not found:
        raise InputError(
            f"None of {seen} texts has the {need + 1} tokens that a prompt of {config.prompt_tokens} and its "
            f"continuation of {config.tokens} need; give longer texts, or fewer tokens."
        )
    return _Beginnings(names, torch.tensor(found, dtype=torch.int64))


def _check_room(model: Any, config: StudyConfig) -> None:
    """Refuse texts that are longer than the model has positions."""
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    need = config.prompt_tokens + config.tokens
    if isinstance(room, int) and need > room:
        raise InputError(
            f"{config.prompt_tokens} tokens of a prompt and {config.tokens} of its continuation are {need}, and the "
            f"model has {room} positions; take fewer tokens."
        )


def _by_position(log_probs: Float[np.ndarray, "P T"], seed: int) -> dict[str, list[Any]]:
    """Mean nats of blocks of positions, with intervals over prompts."""
    starts = range(0, log_probs.shape[1], _BLOCK)
    found: dict[str, list[Any]] = {"from": list(starts), "nats": [], "low": [], "high": []}
    for start in starts:
        own = -log_probs[:, start : start + _BLOCK].mean(1)
        table = np.stack([np.ones_like(own), own], 1)
        ends = bootstrap_interval(table, lambda sums: sums[:, 1] / sums[:, 0], seed=seed)
        found["nats"].append(float(own.mean()))
        for name, end in zip(("low", "high"), ends or (None, None), strict=True):
            found[name].append(end)
    return found


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _sha256(ids: Int[Tensor, "P n"]) -> str:
    return hashlib.sha256(json.dumps(ids.tolist()).encode()).hexdigest()

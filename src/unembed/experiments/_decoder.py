"""A decoding strategy with its options as plain data: what a command or a study says, and what `generate` takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from unembed import decoding
from unembed.decoding._orders import Order
from unembed.results import InputError

StrategyName = Literal["greedy", "sample", "beam", "contrastive", "stochastic-beam", "speculative"]
STRATEGIES: tuple[str, ...] = get_args(StrategyName)
_FUSED = ("temperature", "top_k", "top_p", "min_p")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram", "dry")
_SHAPING = (*_FUSED, "typical_p", "epsilon", "eta", "top_n_sigma", "xtc", "xtc_probability", *_PENALTIES)
# What each strategy listens to, beside what it must have.
_TAKES: dict[str, tuple[str, ...]] = {
    "greedy": _PENALTIES,
    "sample": (*_SHAPING, "order", "returns"),
    "beam": (*_SHAPING, "order", "beams", "length_penalty", "returns"),
    "contrastive": (*_SHAPING, "order", "alpha"),
    "stochastic-beam": (*_SHAPING, "order", "beams"),
    "speculative": (*_SHAPING, "order", "lookahead"),
}


@dataclass(frozen=True)
class Decoder:
    """How tokens are chosen; None where nothing is asked.

    Args:
        strategy: One of `STRATEGIES`.
        temperature: T.
        top_k: Scores to keep; with `contrastive` its number of candidates (4).
        top_p: Mass to keep.
        min_p: Probability to keep, relative to the best one.
        typical_p: Mass of the tokens nearest to the entropy.
        epsilon: Probability to keep.
        eta: Epsilon of eta sampling.
        top_n_sigma: Standard deviations below the best score.
        xtc: Threshold of XTC: all tokens of that probability but the least probable of them are left out at times.
        xtc_probability: How often (0.5).
        repetition_penalty: Of tokens that are in the prompt or were written.
        presence_penalty: Of tokens that were written.
        frequency_penalty: The same, for each time.
        no_repeat_ngram: Tokens of a run that never comes twice.
        dry: Penalty of a token that prolongs a repeat of two tokens; 1.75 times as much for each further one.
        order: Whose order and definitions of filters: a preset of `decoding.ordered`.
        beams: Hypotheses of a search (4).
        length_penalty: Power of the length that beams are compared with (1).
        returns: Sequences a prompt, of a beam search or drawn (1).
        alpha: Weight of the degeneration penalty of contrastive search (0.6).
        lookahead: Tokens that the draft model writes at a time (4).
    """

    strategy: StrategyName = "greedy"
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    epsilon: float | None = None
    eta: float | None = None
    top_n_sigma: float | None = None
    xtc: float | None = None
    xtc_probability: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram: int | None = None
    dry: float | None = None
    order: Order | None = None
    beams: int | None = None
    length_penalty: float | None = None
    returns: int | None = None
    alpha: float | None = None
    lookahead: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InputError(f"`strategy` must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}.")
        idle = [name for name in self.given() if name != "strategy" and name not in _TAKES[self.strategy]]
        if idle:
            raise InputError(
                f"`{idle[0]}` does nothing with strategy {self.strategy}, which takes "
                f"{', '.join(f'`{name}`' for name in _TAKES[self.strategy])}; leave it out or name another strategy."
            )
        if self.xtc is None and self.xtc_probability is not None:
            raise InputError("`xtc_probability` does nothing without `xtc`, its threshold.")

    def given(self) -> dict[str, Any]:
        """What is not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def arguments(self, *, draft: Any = None) -> dict[str, Any]:
        """Arguments of `decoding.generate`.

        Args:
            draft: A model like the target, for `speculative`.

        Raises:
            InputError: If an option is out of its range, or `draft` is missing or of no use.
        """
        if (draft is not None) != (self.strategy == "speculative"):
            wanted = "needs a draft model" if draft is None else "takes no draft model"
            raise InputError(f"Strategy {self.strategy} {wanted}.")
        try:
            return self._arguments(draft)
        except ValueError as error:
            raise InputError(str(error)) from None

    def _arguments(self, draft: Any) -> dict[str, Any]:
        shaping = {name: value for name, value in self.given().items() if name in _SHAPING}
        if self.strategy == "contrastive":
            shaping.pop("top_k", None)
            chosen = decoding.Contrastive(k=self.top_k or 4, alpha=0.6 if self.alpha is None else self.alpha)
        elif self.strategy == "beam":
            penalty = 1.0 if self.length_penalty is None else self.length_penalty
            chosen = decoding.Beam(self.beams or 4, length_penalty=penalty, returns=self.returns or 1)
        elif self.strategy == "stochastic-beam":
            chosen = decoding.StochasticBeam(self.beams or 4)
        elif self.strategy == "speculative":
            chosen = decoding.Speculative(draft, lookahead=self.lookahead or 4)
        else:
            chosen = decoding.Sample() if self.strategy == "sample" else decoding.Greedy()
        found: dict[str, Any] = {"strategy": chosen}
        if self.strategy == "sample" and self.order is None and set(shaping) <= set(_FUSED):
            return found | shaping  # the fused draw is the same as these filters in this order
        if self.xtc is not None:
            often = shaping.pop("xtc_probability", 0.5)
            shaping["xtc"] = decoding.XTC(self.xtc, probability=often)
        if self.dry is not None:
            shaping["dry"] = decoding.DRY(self.dry)
        if shaping:
            found["filters"] = decoding.ordered(order=self.order or "unembed", **shaping)
        return found


def row_seeds(seed: int, places: Iterable[int]) -> list[int]:
    """The seed of each prompt of a run: that of one run is of no prompt of another."""
    return [(seed << 32) + place for place in places]

"""From scores to tokens: filters, exact draws without a sort of the vocabulary, search, and what the text is like."""

from unembed.decoding import metrics
from unembed.decoding._beam import Beam
from unembed.decoding._contrastive import Contrastive
from unembed.decoding._generate import generate
from unembed.decoding._generation import Generation
from unembed.decoding._history import History
from unembed.decoding._multi_token import SelfSpeculative
from unembed.decoding._orders import ordered
from unembed.decoding._plan import Event
from unembed.decoding._sample import sample
from unembed.decoding._scorer import CachedScorer, FunctionScorer, Scorer
from unembed.decoding._speculative import Speculative
from unembed.decoding._steps import Greedy, Sample
from unembed.decoding._stochastic_beam import StochasticBeam
from unembed.decoding._strategy import Strategy
from unembed.decoding.filters import (
    DRY,
    XTC,
    AllowedIds,
    BannedIds,
    Chain,
    Distribution,
    Epsilon,
    Eta,
    Filter,
    FrequencyPenalty,
    Joint,
    MinLength,
    MinP,
    NoRepeatNgram,
    Number,
    PresencePenalty,
    RepetitionPenalty,
    Selection,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)

__all__ = [
    "DRY",
    "XTC",
    "AllowedIds",
    "BannedIds",
    "Beam",
    "CachedScorer",
    "Chain",
    "Contrastive",
    "Distribution",
    "Epsilon",
    "Eta",
    "Event",
    "Filter",
    "FrequencyPenalty",
    "FunctionScorer",
    "Generation",
    "Greedy",
    "History",
    "Joint",
    "MinLength",
    "MinP",
    "NoRepeatNgram",
    "Number",
    "PresencePenalty",
    "RepetitionPenalty",
    "Sample",
    "Scorer",
    "Selection",
    "SelfSpeculative",
    "Speculative",
    "StochasticBeam",
    "Strategy",
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "Typical",
    "generate",
    "metrics",
    "ordered",
    "sample",
]

"""Filters: small pure objects, scores in and scores out, joined by `|` or in a list."""

from unembed.decoding.filters._base import Chain, Filter, Joint, Selection
from unembed.decoding.filters._distribution import Distribution
from unembed.decoding.filters._epsilon import Epsilon
from unembed.decoding.filters._eta import Eta
from unembed.decoding.filters._ids import AllowedIds, BannedIds, MinLength
from unembed.decoding.filters._min_p import MinP
from unembed.decoding.filters._ngram import DRY, NoRepeatNgram
from unembed.decoding.filters._parameters import Number
from unembed.decoding.filters._penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from unembed.decoding.filters._temperature import Temperature
from unembed.decoding.filters._top_k import TopK
from unembed.decoding.filters._top_n_sigma import TopNSigma
from unembed.decoding.filters._top_p import TopP
from unembed.decoding.filters._typical import Typical
from unembed.decoding.filters._xtc import XTC

__all__ = [
    "DRY",
    "XTC",
    "AllowedIds",
    "BannedIds",
    "Chain",
    "Distribution",
    "Epsilon",
    "Eta",
    "Filter",
    "FrequencyPenalty",
    "Joint",
    "MinLength",
    "MinP",
    "NoRepeatNgram",
    "Number",
    "PresencePenalty",
    "RepetitionPenalty",
    "Selection",
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "Typical",
]

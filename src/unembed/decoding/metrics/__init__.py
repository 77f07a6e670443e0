"""What a text is like: likelihood, repetition, diversity; on token ids or words, each number with its interval."""

from unembed.decoding.metrics._all import Measured, text_metrics
from unembed.decoding.metrics._distinct import distinct_n
from unembed.decoding.metrics._likelihood import bits_per_byte, perplexity
from unembed.decoding.metrics._longest_repeat import longest_repeat
from unembed.decoding.metrics._repetition import rep_n, seq_rep_n
from unembed.decoding.metrics._self_bleu import check_installed, self_bleu
from unembed.decoding.metrics._zipf import zipf_coefficient

__all__ = [
    "Measured",
    "bits_per_byte",
    "check_installed",
    "distinct_n",
    "longest_repeat",
    "perplexity",
    "rep_n",
    "self_bleu",
    "seq_rep_n",
    "text_metrics",
    "zipf_coefficient",
]

"""Pure tensor functions."""

from unembed.ops._linalg import ColumnSpace, TallSVD, column_space, tall_svd, thin_r
from unembed.ops._linear_nll import check_targets, chunk_rows, linear_loss, linear_nll, linear_terms, requiring
from unembed.ops._mixture import combined, mixture_loss, mixture_nll
from unembed.ops._rows import Rows, evaluate
from unembed.ops._scores import linear_scores, squared_norms, widened
from unembed.ops._summed import Summed
from unembed.ops._token_statistics import TokenStatistics, linear_kl, token_statistics
from unembed.ops._token_terms import kl_divergence, logsumexp, statistics_of, token_terms, weighted
from unembed.ops._tokens_ahead import tokens_ahead

__all__ = [
    "ColumnSpace",
    "Rows",
    "Summed",
    "TallSVD",
    "TokenStatistics",
    "check_targets",
    "chunk_rows",
    "column_space",
    "combined",
    "evaluate",
    "kl_divergence",
    "linear_kl",
    "linear_loss",
    "linear_nll",
    "linear_scores",
    "linear_terms",
    "logsumexp",
    "mixture_loss",
    "mixture_nll",
    "requiring",
    "squared_norms",
    "statistics_of",
    "tall_svd",
    "thin_r",
    "token_statistics",
    "token_terms",
    "tokens_ahead",
    "weighted",
    "widened",
]

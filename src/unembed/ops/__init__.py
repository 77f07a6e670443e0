"""Pure tensor functions."""

from unembed.ops._attention import attention, fused_obstacle
from unembed.ops._draw import draw
from unembed.ops._entmax import check_alpha, entmax, sparsemax
from unembed.ops._entmax_loss import fenchel_young, loss_rows
from unembed.ops._feature_maps import Elu, Exp, Favor, FeatureMap, Polynomial, Relu, Taylor
from unembed.ops._gumbel import gumbel_noise, gumbel_softmax, gumbel_topk
from unembed.ops._kept_softmax import threshold_softmax, topk_softmax
from unembed.ops._linalg import ColumnSpace, TallSVD, column_space, tall_svd, thin_r
from unembed.ops._linear_attention import LinearState, linear_attention
from unembed.ops._linear_entmax import linear_fenchel_young, linear_fenchel_young_loss
from unembed.ops._linear_nll import (
    LEAST_ROWS,
    check_targets,
    chunk_rows,
    linear_loss,
    linear_nll,
    linear_terms,
    requiring,
)
from unembed.ops._mixture import combined, mixture_loss, mixture_nll
from unembed.ops._rows import Rows, evaluate
from unembed.ops._scores import linear_scores, squared_norms, widened
from unembed.ops._seeds import Noise, Numbers, Stream, uniforms
from unembed.ops._softmax import log_softmax, softmax, softmax_jvp
from unembed.ops._softmax_spectrum import SoftmaxSaturation, softmax_saturation, softmax_spectrum
from unembed.ops._summed import Summed
from unembed.ops._token_statistics import TokenStatistics, linear_kl, token_statistics
from unembed.ops._token_terms import kl_divergence, logsumexp, statistics_of, token_terms, weighted
from unembed.ops._tokens_ahead import tokens_ahead

__all__ = [
    "LEAST_ROWS",
    "ColumnSpace",
    "Elu",
    "Exp",
    "Favor",
    "FeatureMap",
    "LinearState",
    "Noise",
    "Numbers",
    "Polynomial",
    "Relu",
    "Rows",
    "SoftmaxSaturation",
    "Stream",
    "Summed",
    "TallSVD",
    "Taylor",
    "TokenStatistics",
    "attention",
    "check_alpha",
    "check_targets",
    "chunk_rows",
    "column_space",
    "combined",
    "draw",
    "entmax",
    "evaluate",
    "fenchel_young",
    "fused_obstacle",
    "gumbel_noise",
    "gumbel_softmax",
    "gumbel_topk",
    "kl_divergence",
    "linear_attention",
    "linear_fenchel_young",
    "linear_fenchel_young_loss",
    "linear_kl",
    "linear_loss",
    "linear_nll",
    "linear_scores",
    "linear_terms",
    "log_softmax",
    "logsumexp",
    "loss_rows",
    "mixture_loss",
    "mixture_nll",
    "requiring",
    "softmax",
    "softmax_jvp",
    "softmax_saturation",
    "softmax_spectrum",
    "sparsemax",
    "squared_norms",
    "statistics_of",
    "tall_svd",
    "thin_r",
    "threshold_softmax",
    "token_statistics",
    "token_terms",
    "tokens_ahead",
    "topk_softmax",
    "uniforms",
    "weighted",
    "widened",
]

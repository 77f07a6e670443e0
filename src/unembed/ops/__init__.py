"""Pure tensor functions."""

from unembed.ops._linalg import ColumnSpace, TallSVD, column_space, tall_svd, thin_r
from unembed.ops._scores import linear_scores, squared_norms

__all__ = ["ColumnSpace", "TallSVD", "column_space", "linear_scores", "squared_norms", "tall_svd", "thin_r"]

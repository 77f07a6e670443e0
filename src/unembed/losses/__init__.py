"""Objectives on a head, hidden states and targets."""

from unembed.losses._cross_entropy import cross_entropy
from unembed.losses._distillation import distillation
from unembed.losses._fenchel_young import fenchel_young
from unembed.losses._soft import soft_cross_entropy

__all__ = ["cross_entropy", "distillation", "fenchel_young", "soft_cross_entropy"]

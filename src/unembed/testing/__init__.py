"""Checks that anybody's output head or decoding filter can be run through."""

from unembed.testing._check_filter import FILTER_CHECKS, FilterError, check_filter
from unembed.testing._check_head import HeadError, check_head
from unembed.testing._registry import CHECKS, Outcome

__all__ = ["CHECKS", "FILTER_CHECKS", "FilterError", "HeadError", "Outcome", "check_filter", "check_head"]

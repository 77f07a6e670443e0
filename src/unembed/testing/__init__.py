"""Checks that anybody's output head can be run through."""

from unembed.testing._check_head import HeadError, check_head
from unembed.testing._registry import CHECKS, Outcome

__all__ = ["CHECKS", "HeadError", "Outcome", "check_head"]

"""The report: one self-contained HTML page made from a record. No torch here, nothing fetched."""

from unembed.report._render import render, write

__all__ = ["render", "write"]

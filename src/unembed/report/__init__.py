"""The report: one self-contained HTML page made from a record. No torch here, nothing fetched."""

from unembed.report._render import check_installed, render, write

__all__ = ["check_installed", "render", "write"]

"""Reports: self-contained HTML pages made from an audit's record or a study's folder. No torch, nothing fetched."""

from unembed.report._render import check_installed, render, write
from unembed.report._study import render_study, write_study

__all__ = ["check_installed", "render", "render_study", "write", "write_study"]

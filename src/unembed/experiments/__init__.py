"""Runs that can be repeated: text, train loop and recipes. A recipe is a function that returns a config."""

from unembed.experiments import _head_table as head_table
from unembed.experiments._head_costs import HeadCosts
from unembed.experiments._head_table import bench_heads
from unembed.experiments._text import docstring_documents, held_out_documents, text_sha256
from unembed.experiments._train import TrainConfig, TrainRun, train

__all__ = [
    "HeadCosts",
    "TrainConfig",
    "TrainRun",
    "bench_heads",
    "docstring_documents",
    "head_table",
    "held_out_documents",
    "text_sha256",
    "train",
]

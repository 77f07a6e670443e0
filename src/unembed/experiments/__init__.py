"""Runs that can be repeated: text, train loop and recipes. A recipe is a function that returns a config."""

from unembed.experiments import _degeneration_files as study_table
from unembed.experiments import _head_table as head_table
from unembed.experiments._decoder import Decoder, row_seeds
from unembed.experiments._degeneration import StudyConfig, degeneration, study_decoders
from unembed.experiments._head_costs import HeadCosts
from unembed.experiments._head_table import bench_heads
from unembed.experiments._text import docstring_documents, held_out_documents, text_sha256
from unembed.experiments._train import TrainConfig, TrainRun, train

__all__ = [
    "Decoder",
    "HeadCosts",
    "StudyConfig",
    "TrainConfig",
    "TrainRun",
    "bench_heads",
    "degeneration",
    "docstring_documents",
    "head_table",
    "held_out_documents",
    "row_seeds",
    "study_decoders",
    "study_table",
    "text_sha256",
    "train",
]

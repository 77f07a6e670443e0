"""Runs that can be repeated: text, train loop and recipes. A recipe is a function that returns a config."""

from unembed.experiments._text import docstring_documents, held_out_documents, text_sha256
from unembed.experiments._train import TrainConfig, TrainRun, train

__all__ = ["TrainConfig", "TrainRun", "docstring_documents", "held_out_documents", "text_sha256", "train"]

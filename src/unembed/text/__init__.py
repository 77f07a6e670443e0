"""Text in and text out: documents to measure on, and token strings made safe to show. No torch."""

from unembed.text._display import visible
from unembed.text._documents import Document, read_dataset, read_files, read_topics

__all__ = ["Document", "read_dataset", "read_files", "read_topics", "visible"]

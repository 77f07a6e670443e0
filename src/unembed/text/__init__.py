"""Text in and text out: documents to measure on, and token strings made safe to show. No torch."""

from unembed.text._display import visible
from unembed.text._documents import read_dataset, read_files, read_topics
from unembed.text._source import Document, Source, check_documents, one_line, quiet_loggers, require_document

__all__ = [
    "Document",
    "Source",
    "check_documents",
    "one_line",
    "quiet_loggers",
    "read_dataset",
    "read_files",
    "read_topics",
    "require_document",
    "visible",
]

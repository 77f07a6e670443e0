"""What a measurement leaves behind: findings, tables, numbers and their intervals, on disk and back. No torch here."""

from unembed.results._bootstrap import MIN_DOCUMENTS, RESAMPLES, bootstrap_interval
from unembed.results._errors import InputError, IntegrityError
from unembed.results._files import replace_together, write_whole
from unembed.results._record import SCHEMA_VERSION, Record, plain, safe_name
from unembed.results._result import SEVERITIES, Check, Finding, Result, Severity, Table

__all__ = [
    "MIN_DOCUMENTS",
    "RESAMPLES",
    "SCHEMA_VERSION",
    "SEVERITIES",
    "Check",
    "Finding",
    "InputError",
    "IntegrityError",
    "Record",
    "Result",
    "Severity",
    "Table",
    "bootstrap_interval",
    "plain",
    "replace_together",
    "safe_name",
    "write_whole",
]

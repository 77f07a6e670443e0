"""What a measurement leaves behind: findings, tables and numbers, on disk and back. No torch here."""

from unembed.results._errors import InputError, IntegrityError
from unembed.results._files import replace_together, write_whole
from unembed.results._record import SCHEMA_VERSION, Record, safe_name
from unembed.results._result import SEVERITIES, Check, Finding, Result, Severity, Table

__all__ = [
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
    "replace_together",
    "safe_name",
    "write_whole",
]

"""`unembed.audit`: from a model to a record of findings, and from the record to files."""

from unembed._audit._api import Audit, audit, check_options
from unembed._audit._run import MEASUREMENTS

__all__ = ["MEASUREMENTS", "Audit", "audit", "check_options"]

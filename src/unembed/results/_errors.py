"""Errors that are the user's to mend: one line, no traceback on the command line, exit code 2."""


class InputError(ValueError):
    """What was expected, what came, which file, tensor or option, and the mend; in one line."""


class IntegrityError(InputError):
    """A check of the head failed, so no number would be worth printing."""

"""The one exception a person is meant to read."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do; no traceback is shown."""

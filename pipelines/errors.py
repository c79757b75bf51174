"""The one exception a person is meant to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten


class UserError(Exception):
    """Something the user can mend. The message says what is wrong, where, and what to do; no traceback is shown."""


@contextmanager
def failures_said_as(what: str) -> Iterator[None]:
    """Whatever a library raises about files that others made becomes the UserError `what: reason`."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # which one it is depends on the file, the library and its release
        raise UserError(f"{what}: {shorten(str(error), 200) or type(error).__name__}") from error

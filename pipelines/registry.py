"""The one door for imports and data files that are named by a string.

`code.lock` follows string literals of the form "package.module:name" and the literals given to `data_file`,
so a stage is rerun when what hides behind such a name changes. An import by any other dynamic way is refused.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


def load(reference: str) -> Any:
    """The object that "package.module:name" names, for example "pipelines.rl.advantages:centred"."""
    module, separator, name = reference.partition(":")
    if not separator or not name:
        raise ValueError(f"a reference is written package.module:name, found {reference!r}")
    return getattr(import_module(module), name)


def data_file(relative: str) -> Path:
    """A file that lies beside the code: its path under `pipelines/`, for example "base/words.txt"."""
    path = Path(__file__).parent / relative
    if not path.is_file():
        raise FileNotFoundError(f"pipelines/{relative} is not part of this installation")
    return path

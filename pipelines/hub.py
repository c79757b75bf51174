"""Files of the Hugging Face hub, by commit: the only code that reaches another machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.errors import UserError, failures_said_as


def fetch_model(name: str, revision: str, patterns: Sequence[str], key: str) -> Path:
    """A local directory with the files of a model at a commit that match `patterns`.

    Raises UserError, with the parameter `key` in it, when they cannot be had.
    """
    with failures_said_as(f"{key}: {name} at {revision} could not be had from the hub or its cache"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))


def fetch_data(name: str, revision: str, file: str, key: str) -> Path:
    """The local path of one file of a data set at a commit.

    Raises UserError, with the parameter `key` in it, when it cannot be had.
    """
    what = f"{key}: {name}/{file} at {revision} could not be had from the hub or its cache"
    with failures_said_as(what):
        from huggingface_hub import hf_hub_download

        path = Path(hf_hub_download(name, file, revision=revision, repo_type="dataset"))
    if not path.is_file():
        raise UserError(f"{what}: {path.name} is no file there")
    return path

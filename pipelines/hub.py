"""Files of the Hugging Face hub, by commit: the only code that reaches another machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.errors import UserError


def fetch_model(name: str, revision: str, patterns: Sequence[str], key: str) -> Path:
    """A local directory with the files of a model at a commit that match `patterns`.

    Raises UserError, with the parameter `key` in it, when they cannot be had.
    """
    from huggingface_hub import snapshot_download

    return _fetched(lambda: snapshot_download(name, revision=revision, allow_patterns=list(patterns)), name, key)


def fetch_data(name: str, revision: str, file: str, key: str) -> Path:
    """The local path of one file of a data set at a commit.

    Raises UserError, with the parameter `key` in it, when it cannot be had.
    """
    from huggingface_hub import hf_hub_download

    return _fetched(lambda: hf_hub_download(name, file, revision=revision, repo_type="dataset"), f"{name}/{file}", key)


def _fetched(download: Callable[[], str], what: str, key: str) -> Path:
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(download())
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"{key}: {what} could not be downloaded: {error}") from error

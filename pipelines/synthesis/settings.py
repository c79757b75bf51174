"""Parameters of the data stage. Light at import: no torch, no PyArrow."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator, model_validator

from pipelines.environments.families import FAMILIES
from pipelines.environments.verifiers import check_arguments, named
from pipelines.settings import Strict


class FamilyParams(Strict):
    """What to make of one problem family."""

    levels: list[int] = Field(min_length=1, description="difficulty levels to make problems of")
    steps_share: float | None = Field(
        default=None, ge=0, le=1, description="overrides the section's steps_share for this family"
    )


class Columns(Strict):
    """Which column of a file holds what."""

    prompt: str = Field(min_length=1, description="column of the question")
    answer: str = Field(min_length=1, description="column of the known answer")
    level: str | None = Field(default=None, description="column of the difficulty level, an integer; without it 1")
    family: str | None = Field(default=None, description="column of the family name; without it the file's name")
    demonstration: str | None = Field(default=None, description="column of a worked completion to learn from")
    work: str | None = Field(
        default=None, description="column of the work alone; with the answer it makes the demonstration"
    )
    metadata: str | None = Field(
        default=None, description="column of what the scorer of reasoning_gym:NAME reads, a JSON object per row"
    )


class HubFile(Strict):
    """A file of a data set on the Hugging Face hub."""

    dataset: str = Field(pattern=r"^[\w.-]+/[\w.-]+$", description="owner/name")
    revision: str = Field(pattern="^[0-9a-f]{40}$", description="commit, 40 hex digits")
    file: str = Field(min_length=1, description="path in the data set, *.jsonl or *.parquet")
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", description="digest that the file must have")

    @field_validator("file")
    @classmethod
    def _inside(cls, file: str) -> str:
        return _readable(file)


class Source(Strict):
    """A file of problems."""

    path: str | None = Field(default=None, description="file under data/raw, *.jsonl or *.parquet")
    hub: HubFile | None = Field(default=None, description="file on the hub, in place of path")
    columns: Columns = Field(description="which column holds what")
    family: str | None = Field(
        default=None, min_length=1, description="family of all its problems; without it and its column the file's name"
    )
    split: Literal["hash", "train", "test"] = Field(
        default="hash", description="hash: test_share of the prompts are held out | where all of the file goes"
    )
    answer_mark: str | None = Field(
        default=None, min_length=1, description="in the answer's column the answer follows the last of these, as ####"
    )
    remove: str | None = Field(default=None, description="regular expression of what is cut out of the work")
    unusable: Literal["refuse", "leave_out"] = Field(
        default="refuse", description="a row that cannot be used ends the stage | is left out and counted"
    )
    verifier: str = Field(description="exact, numeric, math or reasoning_gym:NAME")
    verifier_args: dict[str, JsonValue] = Field(
        default={}, description="tolerance of numeric, metadata of reasoning_gym:NAME; the others take none"
    )

    @property
    def name(self) -> str:
        """What the file is called in records: its path, or where on the hub it is."""
        return self.path if self.hub is None else f"{self.hub.dataset}/{self.hub.file}"

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str | None) -> str | None:
        return None if path is None else _readable(path)

    @field_validator("remove")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"is no regular expression ({error})") from None
        return pattern

    @field_validator("verifier")
    @classmethod
    def _known(cls, name: str) -> str:
        if not named(name):
            raise ValueError("must be exact, numeric, math or reasoning_gym:NAME")
        return name

    @field_validator("verifier_args")
    @classmethod
    def _taken(cls, arguments: dict[str, JsonValue], info: ValidationInfo) -> dict[str, JsonValue]:
        if "verifier" in info.data:
            check_arguments(info.data["verifier"], arguments)
        return arguments

    @model_validator(mode="after")
    def _one_file(self) -> Source:
        if (self.path is None) == (self.hub is None):
            raise ValueError("needs one of path and hub")
        return self

    @model_validator(mode="after")
    def _one_demonstration(self) -> Source:
        columns = self.columns
        if columns.work is not None and columns.demonstration is not None:
            raise ValueError("needs at most one of columns.work and columns.demonstration")
        if self.remove is not None and columns.work is None:
            raise ValueError("cuts something out of the work (remove), and names no columns.work")
        if self.family is not None and columns.family is not None:
            raise ValueError("needs at most one of family and columns.family")
        return self

    @model_validator(mode="after")
    def _one_metadata(self) -> Source:
        if self.columns.metadata is not None:
            if not self.verifier.startswith("reasoning_gym:"):
                raise ValueError(f"columns.metadata is for reasoning_gym:NAME; the verifier {self.verifier} reads none")
            if "metadata" in self.verifier_args:
                raise ValueError("needs metadata in one place, columns.metadata or verifier_args.metadata")
        return self


def _readable(path: str) -> str:
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts:
        raise ValueError("must be a path inside data/raw or the data set, such as problems.jsonl")
    if parts.suffix not in (".jsonl", ".parquet"):
        raise ValueError("must end in .jsonl or .parquet")
    return path


class SynthesizeParams(Strict):
    """Problems per level and split, and how the teachers demonstrate."""

    families: dict[str, FamilyParams] = Field(description="generated problem families, by name; may be empty")
    train_per_level: int = Field(ge=0, description="training problems per family and level")
    test_per_level: int = Field(ge=0, description="held-out problems per family and level")
    test_share: float = Field(
        gt=0,
        lt=1,
        description="share of all possible prompts that is held out, by their hash, whatever the seed",
    )
    steps_share: float = Field(
        ge=0, le=1, description="share of demonstrations that show the work; the others answer at once"
    )
    sources: list[Source] = Field(default=[], description="files with problems of your own")

    @field_validator("families")
    @classmethod
    def _levels(cls, families: dict[str, FamilyParams]) -> dict[str, FamilyParams]:
        for name, params in families.items():
            if name not in FAMILIES:
                raise ValueError(f"there is no family {name!r}; there are {', '.join(FAMILIES)}")
            unknown = [level for level in params.levels if level not in FAMILIES[name].levels]
            if unknown or len(set(params.levels)) < len(params.levels):
                raise ValueError(f"{name} has the levels {list(FAMILIES[name].levels)}, each at most once")
        return families

    @model_validator(mode="after")
    def _something(self) -> SynthesizeParams:
        if not self.families and not self.sources:
            raise ValueError("needs at least one of families and sources")
        return self

"""params.yaml, checked as a whole before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pipelines.errors import UserError
from tasks.yamlfile import read_yaml

PARAMS = "params.yaml"


class Settings:
    """The validated parameters, or those a stage declares in dvc.yaml."""

    def __init__(
        self, sections: Mapping[str, Any], seed: int, threads: int, rounds: Mapping[str, Any]
    ) -> None:
        self._sections, self.seed, self.threads, self.rounds = dict(sections), seed, threads, dict(rounds)

    def section(self, name: str) -> Any:
        return self._sections[name]


def load_params(root: Path | str, only: Collection[str] | None = None) -> Settings:
    import importlib
    import json

    raw = read_yaml(Path(root) / PARAMS)
    names = [n for n in raw if n not in ("seed", "threads", "rounds") and (only is None or n in only)]
    sections = {}
    for name in names:
        model = importlib.import_module(f"tasks.{name}").Params
        try:
            sections[name] = model.model_validate_json(json.dumps(raw[name]), strict=True)
        except ValueError as error:
            raise UserError(str(error)) from None
    return Settings(sections, raw["seed"], raw["threads"], raw.get("rounds", {}))


def values(root: Path | str, keys: Collection[str]) -> dict[str, Any]:
    """The parameters as written in params.yaml, by dotted key. Raises UserError for a missing key."""
    document = read_yaml(Path(root) / PARAMS)
    found = {}
    for key in keys:
        value: Any = document
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise UserError(f"{PARAMS}: {key} is missing; dvc.yaml says that a stage uses it")
            value = value[part]
        found[key] = value
    return found

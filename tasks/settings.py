"""params.yaml, checked as a whole before anything runs, with every mistake on one screen.

A line per mistake: `params.yaml: rl.optimiser.lr: found "fast" (str); allowed: a number > 0`.
"""

from __future__ import annotations

import difflib
import importlib
import json
import posixpath
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, ValidationError, model_validator

from pipelines.errors import UserError
from pipelines.generation.settings import EngineParams, NativeEngineParams
from pipelines.settings import Strict
from tasks.yamlfile import read_yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

PARAMS = "params.yaml"
_MOST_LINES = 16  # of mistakes; with the lines around them they fit one screen
_LONGEST_VALUE = 60  # characters of a wrong value that are shown
_PLACEHOLDER = re.compile(r"\$\{([\w.]+)\}")


class Round(Strict):
    """One RL round."""

    init: str = Field(min_length=1, description="checkpoint directory that the round starts from")


class Distributed(Strict):
    """How a stage that trains is spread over processes of this machine."""

    processes: int = Field(default=1, ge=1, le=1024, description="processes, one per GPU where there are GPUs")


class _TopLevel(Strict):
    """What every stage shares."""

    seed: int = Field(ge=0, le=2**32 - 1, description="of everything random")
    threads: int = Field(ge=1, le=256, description="CPU threads of a stage")
    engine: EngineParams = Field(default=NativeEngineParams(name="native"), description="what samples")
    distributed: Distributed = Field(default=Distributed(), description="how stages that train are spread")

    @model_validator(mode="after")
    def _one_group(self) -> _TopLevel:
        if self.engine.name == "vllm" and self.engine.url is None and self.distributed.processes > 1:
            raise ValueError(
                "engine: vLLM in the stage's process does not go with distributed.processes above 1; start a server "
                "and give its url, or use the native engine"
            )
        return self


_UNREAD = {"seed": 0, "threads": 1}  # stand for what a stage does not declare and so cannot read


class Settings:
    """Validated parameters: all of them, or those that one stage declares in dvc.yaml.

    What a stage did not declare it cannot read, since DVC would not see it change (UserError).
    """

    def __init__(
        self, top: Mapping[str, Any], sections: Mapping[str, BaseModel], rounds: Mapping[str, Round] | None
    ) -> None:
        self._top, self._sections, self._rounds = dict(top), dict(sections), rounds

    @property
    def seed(self) -> int:
        return self._declared(self._top, "seed")

    @property
    def threads(self) -> int:
        return self._declared(self._top, "threads")

    @property
    def engine(self) -> EngineParams:
        return self._declared(self._top, "engine")

    @property
    def distributed(self) -> Distributed:
        return self._declared(self._top, "distributed")

    @property
    def rounds(self) -> dict[str, Round]:
        return dict(self._declared({"rounds": self._rounds} if self._rounds is not None else {}, "rounds"))

    def section(self, name: str) -> Any:
        """The `Params` of a stage."""
        return self._declared(self._sections, name)

    @staticmethod
    def _declared(values: Mapping[str, Any], name: str) -> Any:
        if name not in values:
            raise UserError(f"dvc.yaml: the stage reads parameter {name} without declaring it under `params:`")
        return values[name]


def load_params(root: Path | str, only: Collection[str] | None = None) -> Settings:
    """Read and check params.yaml; `only` limits both to the dotted keys that a stage declares.

    Raises UserError with one line per mistake.
    """
    root = Path(root)
    document, graph = read_yaml(root / PARAMS), read_yaml(root / "dvc.yaml")
    if not document:
        raise UserError(f"{PARAMS}: the file is empty; it must hold seed, threads and a section per stage")
    groups = [group for group in _groups(graph) if only is None or any(_within(key, group) for key in only)]
    models = {group: stage_params(group) for group in groups}
    problems = [] if only is not None else _unknown(document, [*_TopLevel.model_fields, "rounds", *models], "")
    wanted_top = [name for name in _TopLevel.model_fields if only is None or name in only]
    given = {name: document[name] for name in wanted_top if name in document}
    top, found = _validate(_TopLevel, {**({} if only is None else _UNREAD), **given}, "")
    problems += found
    sections = {}
    for name, model in models.items():
        if name not in document and model.model_fields:
            problems.append((name, f"the section is missing; allowed: {_shape(model.model_json_schema(), {})}"))
            continue
        sections[name], found = _validate(model, document.get(name, {}), name)
        problems += found
    rounds, found = _rounds(document, only, _foreach_outputs(graph))
    problems += found
    if only is None and not found:
        problems += _dangling(document, graph, root)
    if problems:
        raise UserError(_screen(problems))
    return Settings({name: getattr(top, name) for name in wanted_top}, sections, rounds)


def values(root: Path | str, keys: Collection[str]) -> dict[str, Any]:
    """The parameters as written in params.yaml, by dotted key. Raises UserError for a missing key."""
    document = read_yaml(Path(root) / PARAMS)
    found = {}
    for key in keys:
        present, found[key] = _look_up(document, key)
        if not present:
            raise UserError(f"{PARAMS}: {key}: missing; dvc.yaml says that a stage uses it")
    return found


def stage_params(group: str) -> type[BaseModel]:
    """The parameter model of a stage: `Params` of tasks/GROUP.py."""
    try:
        return importlib.import_module(f"tasks.{group}").Params
    except ModuleNotFoundError as error:
        if error.name != f"tasks.{group}":
            raise
        raise UserError(f"dvc.yaml: a stage runs tasks.{group}, and there is no tasks/{group}.py") from None


# --- what dvc.yaml says ----------------------------------------------------------------------------------------


def _groups(graph: Mapping[str, Any]) -> list[str]:
    commands = [(stage.get("do") or stage).get("cmd", "") for stage in (graph.get("stages") or {}).values()]
    return [match[1] for command in commands if (match := re.match(r"python3? -m tasks\.(\w+)", str(command)))]


def _foreach_outputs(graph: Mapping[str, Any]) -> list[str]:
    """Output templates of the stages of one round, such as data/rl/${key}."""
    stages = (graph.get("stages") or {}).values()
    return [out for stage in stages if stage.get("foreach") == "${rounds}" for out in stage["do"].get("outs", [])]


def _dangling(document: Mapping[str, Any], graph: Mapping[str, Any], root: Path) -> list[tuple[str, str]]:
    """Parameters that name a checkpoint directory which no stage makes and which does not exist."""
    rounds = list(document.get("rounds") or {})
    per_round = _foreach_outputs(graph)
    stages = (graph.get("stages") or {}).values()
    makes = [(stage.get("do") or stage).get("meta", {}).get("makes") for stage in stages]
    makers = [stage for stage, kind in zip(stages, makes, strict=True) if kind == "policy" or "policy" not in makes]
    outs = [out for stage in makers if "do" not in stage for out in stage.get("outs", [])]
    outs += [template.replace("${key}", key) for template in per_round for key in rounds]
    named = {}  # dotted key -> directory
    for stage in stages:
        for dep in (stage.get("do") or stage).get("deps", []):
            match = _PLACEHOLDER.fullmatch(str(dep))
            if match and match[1].startswith("item.") and stage.get("foreach") == "${rounds}":
                field = match[1].removeprefix("item.")
                named |= {f"rounds.{key}.{field}": document["rounds"][key][field] for key in rounds}
            elif match and not match[1].startswith("item"):
                named[match[1]] = _look_up(document, match[1])[1]
    problems = []
    for key, directory in named.items():
        if not isinstance(directory, str):  # missing or of another type, which its model says
            continue
        of_no_round = any(directory.startswith(template.partition("${")[0]) for template in per_round)
        plain = posixpath.normpath(directory)
        if directory != plain:
            problems.append((key, f"found {_shown(directory)}; write it as {plain}"))
        elif directory not in outs and (of_no_round or not (root / directory / "config.json").is_file()):
            allowed = f"a checkpoint that a stage makes ({', '.join(outs)}) or a directory with one"
            problems.append((key, f"found {_shown(directory)}; allowed: {allowed}"))
    return problems


def _rounds(
    document: Mapping[str, Any], only: Collection[str] | None, outputs: list[str]
) -> tuple[dict[str, Round] | None, list[tuple[str, str]]]:
    declared = None if only is None else [key for key in only if _within(key, "rounds")]
    if declared == [] or (not outputs and "rounds" not in document):
        return None, []
    given = document.get("rounds")
    shape = 'a mapping of quoted numbers "1", "2", ... to {init: DIRECTORY}'
    if not isinstance(given, Mapping) or not given:
        found = f"found {_shown(given)}" if "rounds" in document else "missing"
        return {}, [("rounds", f"{found}; allowed: {shape}")]
    problems: list[tuple[str, str]] = []
    rounds: dict[str, Round] = {}
    for number, (key, value) in enumerate(given.items(), start=1):
        if not isinstance(key, str):
            problems.append((f"rounds.{key}", f'the key is not quoted; write "{key}": instead of {key}:'))
            continue
        if key != str(number):
            problems.append(
                (f'rounds."{key}"', f'found "{key}"; allowed: "{number}", rounds are numbered without gaps from "1"')
            )
        rounds[key], found = _validate(Round, value, f"rounds.{key}")
        problems += found
        if found:
            continue
        later = [template.replace("${key}", str(other)) for template in outputs for other in list(given)[number - 1 :]]
        if rounds[key].init in later:
            problems.append(
                (
                    f"rounds.{key}.init",
                    f"found {_shown(rounds[key].init)}; allowed: a checkpoint from before this round",
                )
            )
    if declared is not None and "rounds" not in declared:
        rounds = {key: value for key, value in rounds.items() if f"rounds.{key}" in declared}
        problems = [problem for problem in problems if any(_within(problem[0], key) for key in declared)]
    return rounds, problems


# --- from pydantic's errors to sentences --------------------------------------------------------------------------


def _validate(model: type[BaseModel], value: Any, prefix: str) -> tuple[Any, list[tuple[str, str]]]:
    """A model of `value`, or its problems as (dotted key, sentence)."""
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})
    if not isinstance(value, Mapping):
        return None, [(prefix, f"found {_shown(value)}; allowed: {_shape(schema, definitions)}")]
    problems = [
        (_join(prefix, key), "a key must be text; put it in quotes") for key in value if not isinstance(key, str)
    ]
    try:
        # JSON, because its strict mode takes a YAML list for a tuple and still converts nothing else
        return model.model_validate_json(json.dumps(value, default=str), strict=True), problems
    except ValidationError as error:
        return None, problems + [_sentence(item, value, schema, definitions, prefix) for item in error.errors()]


def _sentence(
    error: Mapping[str, Any], value: Any, schema: Mapping[str, Any], definitions: Mapping[str, Any], prefix: str
) -> tuple[str, str]:
    *way, last = error["loc"] or ("",)
    key = prefix
    for part in way:  # a part that names no key of the document is the tag of a union
        schema = _step(schema, part, definitions)
        if isinstance(value, Mapping | list) and _has(value, part):
            value, key = value[part], _join(key, part)
    if error["type"] == "extra_forbidden":
        known = list(_resolve(schema, definitions).get("properties", {}))
        return _unknown([last], known, key)[0]
    if error["type"] == "missing":
        allowed = _shape(_step(schema, last, definitions), definitions)
        return _join(key, last), f"missing; allowed: {allowed}"
    if error["type"] == "union_tag_not_found":
        tag = str(error["ctx"]["discriminator"]).strip("'")
        return _join(_join(key, last), tag), f"missing; allowed: {_tags(_step(schema, last, definitions))}"
    if isinstance(value, Mapping | list) and _has(value, last):
        value, key, schema = value[last], _join(key, last), _step(schema, last, definitions)
    if error["type"] == "union_tag_invalid":
        tag = str(error["ctx"]["discriminator"]).strip("'")
        return _join(key, tag), f"found {_shown(value[tag])}; allowed: {_tags(schema)}"
    if error["type"] == "value_error":
        return key, str(error["ctx"]["error"])
    return key, f"found {_shown(value)}; allowed: {_shape(schema, definitions)}"


def _unknown(keys: Collection[Any], known: list[str], prefix: str) -> list[tuple[str, str]]:
    problems = []
    for key in keys:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(known) or 'none'}"
            problems.append((_join(prefix, key), f"unknown key; {hint}"))
    return problems


def _step(schema: Mapping[str, Any], part: Any, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of one item or key, or of one branch of a tagged union; {} when it says nothing about it."""
    schema = _resolve(schema, definitions)
    tagged = schema.get("discriminator", {}).get("mapping", {})
    if part in tagged:
        return _resolve({"$ref": tagged[part]}, definitions)
    if isinstance(part, int):
        return schema.get("items", {})
    if part in schema.get("properties", {}):
        return schema["properties"][part]
    if isinstance(schema.get("additionalProperties"), Mapping):
        return schema["additionalProperties"]
    branches = [branch for branch in schema.get("anyOf", []) if branch.get("type") != "null"]
    return _step(branches[0], part, definitions) if len(branches) == 1 else {}


def _resolve(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    return definitions.get(reference.rpartition("/")[2], {}) if reference else schema


def _shape(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words."""
    schema = _resolve(schema, definitions)
    if "enum" in schema or "const" in schema:
        return " | ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return " or ".join(dict.fromkeys(_shape(branch, definitions) for branch in branches))
    bounds = _bounds(schema)
    match schema.get("type"):
        case "integer":
            return f"an integer{bounds}"
        case "number":
            return f"a number{bounds}"
        case "string":
            least = ", not empty" if schema.get("minLength") else ""
            return f"text matching {schema['pattern']}" if "pattern" in schema else f"text{least}"
        case "boolean":
            return "true | false"
        case "null":
            return "null"
        case "array":
            items = _shape(schema.get("items", {}), definitions)
            least = f", at least {schema['minItems']}" if schema.get("minItems") else ""
            return f"a list{least}, each {items}"
        case "object" if "properties" in schema:
            return f"a mapping with the keys {', '.join(schema['properties'])}"
        case "object":
            return f"a mapping, each value {_shape(schema.get('additionalProperties') or {}, definitions)}"
    return "another value"


def _bounds(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        text = f" from {low:g} to {high:g}" if max(abs(low), abs(high)) < 1e6 else f" from {low} to {high}"
    else:
        signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
        parts = [f"{sign} {schema[name]:g}" for name, sign in signs.items() if name in schema]
        text = f" {' and '.join(parts)}" if parts else ""
    return text + (f", a multiple of {schema['multipleOf']:g}" if "multipleOf" in schema else "")


def _tags(schema: Mapping[str, Any]) -> str:
    tagged = [branch for branch in (schema, *schema.get("anyOf", [])) if "discriminator" in branch]
    return " | ".join(tagged[0]["discriminator"]["mapping"]) if tagged else "another value"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing (null)"
    kind = "mapping" if isinstance(value, Mapping) else type(value).__name__
    text = json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, float):
        text = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(text, text)
    return f"{text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + '...'} ({kind})"


def _has(container: Mapping[Any, Any] | list[Any], part: Any) -> bool:
    if isinstance(container, list):
        return isinstance(part, int) and part < len(container)
    return part in container


def _look_up(document: Any, key: str) -> tuple[bool, Any]:
    for part in key.split("."):
        if not isinstance(document, Mapping) or part not in document:
            return False, None
        document = document[part]
    return True, document


def _join(prefix: str, part: Any) -> str:
    return f"{prefix}[{part}]" if isinstance(part, int) else f"{prefix}.{part}" if prefix else str(part)


def _within(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _screen(problems: list[tuple[str, str]]) -> str:
    lines = [": ".join(filter(None, (PARAMS, key, sentence))) for key, sentence in problems[:_MOST_LINES]]
    more = len(problems) - len(lines)
    return "\n".join([*lines, f"and {more} more"] if more else lines)

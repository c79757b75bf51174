"""Recipes: named overlays on params.yaml, which keeps its comments and everything a recipe does not name."""

from __future__ import annotations

import difflib
import io
from pathlib import Path
from typing import Any

from flows.plan import differences, validate
from pipelines.errors import UserError
from tasks.graph import PARAMS_FILE, load_graph
from tasks.yamlfile import read_yaml, write_atomically

_INSTALLED = Path(__file__).resolve().parent.parent


def recipes(root: Path) -> dict[str, Path]:
    """Name -> file of every recipe, such as small or real/qwen3-4b: the project's own, else the installed ones."""
    base = (root if (root / "pipelines").is_dir() else _INSTALLED) / "pipelines" / "recipes"
    return {
        path.relative_to(base).with_suffix("").as_posix(): path
        for path in sorted(base.rglob("*.yaml"))
        if path.is_file()
    }


def list_recipes(root: Path) -> None:
    """Print the name of every recipe and what it is for, the first comment of its file."""
    known = recipes(root)
    width = max(map(len, known), default=0)
    for name, path in known.items():
        first = path.read_text(encoding="utf-8-sig", errors="replace").partition("\n")[0]
        print(f"{name:<{width}}  {first.removeprefix('#').strip() if first.startswith('#') else ''}".rstrip())


def apply_recipe(root: Path, name: str) -> None:
    """Write a recipe's values into params.yaml and print what changed.

    Raises UserError for an unknown recipe, and, with params.yaml left as it was, when the outcome is not valid.
    """
    overlay = read_yaml(_find(root, name))
    path = root / PARAMS_FILE
    before_text = path.read_text(encoding="utf-8") if path.is_file() else ""
    before = read_yaml(path)
    after_text = overlaid(before_text, overlay)
    if after_text == before_text:
        print(f"params.yaml holds the values of `{name}` already.")
        return
    write_atomically(path, after_text)
    try:
        validate(root, load_graph(root))
    except UserError as error:
        write_atomically(path, before_text)
        raise UserError(
            f"The recipe `{name}` does not fit this params.yaml, which stays as it was:\n{error}"
        ) from error
    after = read_yaml(path)
    changes = [text for key in after for text in _changes(key, before.get(key), after[key])]
    print("\n".join([f"params.yaml now holds the recipe `{name}`:", *(f"  {change}" for change in changes)]))
    print("`ratchet plan` says what that reruns.")


def _find(root: Path, name: str) -> Path:
    known = recipes(root)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean `{near[0]}`?" if near else ""
        raise UserError(f"There is no recipe `{name}`.{hint} Recipes: {', '.join(sorted(known))}.")
    return known[name]


def overlaid(text: str, overlay: dict[str, Any]) -> str:
    """The YAML text with the overlay's values in it; mappings are merged, anything else is replaced.

    So is a mapping that says of which `kind` or `name` it is, and one that is empty.
    """
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    document = yaml.load(text) or {}
    if _merge(document, overlay):
        stream = io.StringIO()
        yaml.dump(document, stream)
        return stream.getvalue()
    return text


def _merge(document: Any, overlay: dict[str, Any]) -> bool:
    """Merge in place; True when something changed."""
    changed = False
    for key, value in overlay.items():
        if isinstance(value, dict) and isinstance(document.get(key), dict) and _is_partial(value):
            changed |= _merge(document[key], value)
        elif key not in document or document[key] != value:
            document[key] = value
            changed = True
    return changed


def _is_partial(mapping: dict[str, Any]) -> bool:
    return bool(mapping) and not {"kind", "name"} & mapping.keys()


def _changes(key: str, before: Any, after: Any) -> list[str]:
    return list(differences(key, before, after)) if before != after else []

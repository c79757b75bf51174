"""The command `ratchet`. Everything heavier than the plan is imported by the command that needs it."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from pipelines.errors import UserError


class Commands(typer.core.TyperGroup):
    """Turns the exceptions a person is meant to read into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            print(f"ratchet: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
                raise
            print(f"ratchet: {error.filename or 'writing'}: {error.strerror}.", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            print("ratchet: interrupted; `ratchet run` goes on from where it stopped.", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="ratchet",
    cls=Commands,
    help="Runs, reruns and audits a post-training pipeline: from a base model to an evaluated reasoning model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(
    directory: Annotated[
        Path | None, typer.Option("-C", "--directory", help="Work in this project instead of the current directory.")
    ] = None,
) -> None:
    if directory is not None:
        try:
            os.chdir(directory)
        except OSError as error:
            raise UserError(f"-C {directory}: {error.strerror}.") from None


@app.command()
def plan(json_output: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False) -> None:
    """Say which stages are stale and why."""
    from flows.plan import make_plan

    states = make_plan(Path.cwd())
    if json_output:
        import json

        rows = [{"name": s.name, "state": s.state, "reasons": s.reasons} for s in states]
        print(json.dumps({"stages": rows}, indent=2, ensure_ascii=False))
        return
    width = max(len(s.name) for s in states)
    for s in states:
        first, *rest = s.reasons or [""]
        print(f"{s.name:<{width}}  {s.state:<16}  {first}".rstrip())
        for reason in rest:
            print(f"{'':<{width}}  {'':<16}  {reason}")
    due = sum(s.is_due for s in states)
    print()
    print(f"`ratchet run` brings {due} of {len(states)} up to date." if due else "Everything is up to date.")


@app.command()
def run(
    stages: Annotated[
        list[str] | None, typer.Argument(metavar="STAGE", help="The stages to run; all when none is named.")
    ] = None,
    upstream: Annotated[bool, typer.Option("--upstream", help="Also run what is stale above them.")] = False,
    downstream: Annotated[bool, typer.Option("--downstream", help="Also run what is stale below them.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Run them even if they are fresh.")] = False,
    prefect: Annotated[bool, typer.Option("--prefect", help="Run as a Prefect flow, one task per stage.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print plain lines instead of a live display.")] = False,
) -> None:
    """Run what is stale."""
    if prefect:
        from flows.prefect_flow import run_with_prefect as run_stages
    else:
        from flows.driver import run as run_stages
    from flows.display import make_display
    from flows.table import print_result

    result = run_stages(Path.cwd(), stages or [], upstream, downstream, force, make_display(plain))
    print_result(Path.cwd(), result)
    raise typer.Exit(result.exit_code)


@app.command()
def audit(
    target: Annotated[str, typer.Argument(metavar="STAGE|DIRECTORY", help="A stage, or a directory it published.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Say what a checkpoint was made of, back to the raw data; exit code 2 when its bytes or the log were altered."""
    from tasks.audit import audit as make_report
    from tasks.audit import render

    report = make_report(Path.cwd(), target)
    if json_output:
        import json

        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        print(render(report))
    if report["state"] != "intact" or report["log"]["breaks"]:
        raise typer.Exit(2)


@app.command()
def logs(
    stage: Annotated[str, typer.Argument(metavar="STAGE")],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing as the stage writes.")] = False,
) -> None:
    """Print what a stage said in its last run, also while it runs."""
    from flows.logs import show_log

    show_log(Path.cwd(), stage, follow)


@app.command()
def generate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint directory, or a stage.")],
    prompt: Annotated[str | None, typer.Option(help="What to ask; without it, one question per input line.")] = None,
    samples: Annotated[int, typer.Option(min=1, max=4096, help="Answers per question.")] = 1,
    temperature: Annotated[float, typer.Option(min=0.01, max=10.0, help="1 is the model's own distribution.")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, max=65536, help="Longest answer, in tokens; without it, what the model has room for."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
) -> None:
    """Ask a checkpoint."""
    from flows.generate import converse

    converse(Path.cwd(), checkpoint, prompt, samples, temperature, max_new_tokens, seed)


@app.command()
def recipe(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The recipe; without it they are listed.")] = None,
) -> None:
    """Overlay a named setting on params.yaml."""
    from flows.recipe import apply_recipe, list_recipes

    if name is None:
        list_recipes(Path.cwd())
    else:
        apply_recipe(Path.cwd(), name)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: 0, 1 (a stage failed), 2 (a mistake to mend) or 130 (interrupted)."""
    app(arguments)


if __name__ == "__main__":
    main()

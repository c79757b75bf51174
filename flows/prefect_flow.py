"""The same run as a Prefect flow: one task per stage, retries, logs and artifacts.

Prefect decides when a stage is looked at and keeps a view of it. Whether the stage is stale is decided by the plan
alone, so nothing of Prefect's own caching is used.
"""

# ruff: noqa: E402  (Prefect reads its environment when it is imported)
from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

os.environ.setdefault("PREFECT_HOME", str(Path.cwd() / ".ratchet" / "prefect"))
Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect does not make parents
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "90")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "true")

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.context import get_run_context
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Completed, Failed, State

from flows.driver import Display, Result, blocked, follow, interruptible
from flows.plan import StageState
from flows.session import NOISE, Outcome, Session, open_session
from flows.table import closing_text
from pipelines.errors import UserError

_POLL = 0.1  # seconds between two looks at a running stage
_RETRIES = 2
_REFUSED = "Refused"  # the state of what only a person can mend
_RECORD_PATIENCE = 5.0  # seconds
_sessions: dict[str, Session] = {}
_results: dict[str, Result] = {}
_refusals: dict[str, UserError] = {}


class StageFailed(Exception):
    """A stage ended badly, and not by a mistake of the user; trying again may help."""


class StageInterrupted(Exception):
    """A stage was ended because its run was."""


def _may_retry(_task: Any, _run: Any, state: State[Any]) -> bool:
    return state.name != _REFUSED and not isinstance(state.result(raise_on_failure=False), StageInterrupted)


@task(
    name="stage",
    task_run_name="{name}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=_RETRIES,
    retry_delay_seconds=1,
    retry_condition_fn=_may_retry,
)
def stage(root: str, name: str, forced: bool) -> Any:
    """Run one stage if it is stale. A mistake of the user is not tried again, any other failure is."""
    session, result, logger = _sessions[root], _results[root], get_run_logger()
    is_retry = get_run_context().task_run.run_count > 1
    running = session.start(name, forced, resume=is_retry)
    if running is None:
        result.outcomes.append(Outcome(name, "skipped"))
        return Completed(name="Skipped", message=f"{name} is up to date")
    logger.info("started: %s", "; ".join(running.reasons))
    while not follow(running.process, lambda text: None if NOISE.match(text) else logger.info("%s", text)):
        if session.closing.is_set():
            break
        time.sleep(_POLL)
    if session.closing.is_set():
        raise StageInterrupted(f"{name} was ended with its run")
    outcome = session.finish(name)
    result.outcomes.append(outcome)
    if outcome.is_good:
        return Completed(name=outcome.status.capitalize(), message=f"{name}: {outcome.status}")
    if outcome.kind == "user":
        return Failed(name=_REFUSED, message=outcome.message)  # as a state: no traceback, no retry
    raise StageFailed(outcome.message)


@flow(name="pipeline", persist_result=False)
def pipeline(
    root: str = ".",
    stages: list[str] | None = None,
    upstream: bool = False,
    downstream: bool = False,
    force: bool = False,
) -> Any:
    """Run what is stale among the named stages, or all. Ends as Failed when a stage fails."""
    directory = Path(root).absolute()
    key = str(directory)
    _results.pop(key, None)
    try:
        _run_tasks(directory, key, stages or [], upstream, downstream, force)
    except UserError as error:
        _refusals[key] = error
        return Failed(name=_REFUSED, message=str(error))
    result = _results[key]
    create_markdown_artifact(key="result", markdown=result_markdown(directory, result))
    if not result.failures:
        return Completed(message=f"{len(result.outcomes)} stages are up to date")
    words = "\n".join(f"stage {outcome.name} failed: {outcome.message}" for outcome in result.failures)
    return Failed(message=words)


def _run_tasks(
    directory: Path, key: str, names: Collection[str], upstream: bool, downstream: bool, force: bool
) -> None:
    logger = get_run_logger()
    begun = time.monotonic()
    with open_session(directory) as session:
        create_markdown_artifact(key="plan", markdown=plan_markdown(list(session.plan.values())))
        selected = session.select(names, upstream, downstream)
        for note in session.take_notes():
            logger.info("%s", note)
        forced = session.forced(names, selected) if force else set()
        _sessions[key], _results[key] = session, Result()
        futures: dict[str, Any] = {}
        for name in selected:
            above = [futures[n] for n in session.graph.ancestors(name) if n in futures]
            futures[name] = stage.with_options(name=name).submit(key, name, name in forced, wait_for=above)
        for future in futures.values():
            future.wait()
        _results[key] = _complete(session, selected, _results[key], time.monotonic() - begun)


def _complete(session: Session, selected: list[str], seen: Result, seconds: float) -> Result:
    """One outcome per selected stage: the last attempt of each, and the stages that were never started."""
    last = {outcome.name: outcome for outcome in seen.outcomes}
    for name in selected:
        if name not in last:
            broken = [n for n in session.graph.ancestors(name) if n in last and not last[n].is_good]
            last[name] = blocked(name, broken)
    return Result([last[name] for name in selected], seconds)


def plan_markdown(states: list[StageState]) -> str:
    """The plan as a Markdown table."""
    rows = [f"| {s.name} | {s.state} | {_cell('; '.join(s.reasons))} |" for s in states]
    return "\n".join(["| stage | state | why |", "|---|---|---|", *rows])


def result_markdown(root: Path, result: Result) -> str:
    """How every stage ended, and the closing table."""
    rows = [f"| {o.name} | {o.status} | {o.seconds:.1f} | {_cell(o.message)} |" for o in result.outcomes]
    lines = ["| stage | outcome | seconds | message |", "|---|---|---|---|", *rows]
    if not result.failures:
        lines += ["", "```", closing_text(root, result).strip(), "```"]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", "<br>")


def run_with_prefect(
    root: Path | str,
    names: Collection[str],
    upstream: bool,
    downstream: bool,
    force: bool,
    display: Display,
) -> Result:
    """Run the flow here and now; without PREFECT_API_URL on a server of its own that lives as long as the run.

    `display` is not used: Prefect logs to the terminal itself. Raises UserError before anything runs.
    """
    key = str(Path(root).absolute())
    with interruptible(), temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):  # it adds 1 s to a flow
        state = pipeline(key, list(names), upstream, downstream, force, return_state=True)
        _wait_until_recorded(state)
    if key in _results:
        return _results[key]
    if key in _refusals:
        raise _refusals.pop(key)
    raise StageFailed(f"the flow ended in state {state.name}: {state.message}")


def _wait_until_recorded(state: State[Any]) -> None:
    """Give the server a moment to write down how the tasks ended; a temporary one forgets what it has not."""
    if state.state_details.flow_run_id is None:
        return
    flow_runs = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    deadline = time.monotonic() + _RECORD_PATIENCE
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            runs = client.read_task_runs(flow_run_filter=flow_runs)
            if all(run.state is not None and (run.state.is_final() or run.state.is_pending()) for run in runs):
                return
            time.sleep(_POLL)

"""The process that carries the journals of stage executions into MLflow: `python -m tasks.courier [JOURNAL]`.

With a journal it first delivers what earlier stages left behind, then follows the journal until its stage ends
or dies. Without one it delivers what was left behind and exits. Only this process imports MLflow.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import sqlite3
import sys
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.recording import (
    EVERY,
    SPOOL,
    TIMEOUT,
    milliseconds,
    read_json,
    scrub,
    state_path,
    tracking_uri,
    write_json,
)

_BATCH = 1000  # metrics in one request, MLflow's limit
_SQLITE = "sqlite:///"
_NICENESS = 10  # the stage's own threads come first; while it waits for the courier they leave the processor free


def _name(name: str) -> str:
    """`name` in the letters that MLflow allows for parameters and metrics."""
    return re.sub(r"[^\w\-. /:]", "_", name)


class _Elsewhere(Exception):
    """A journal that was begun at another tracking server."""


class _Delivery:
    """Carries one journal into MLflow, from where the last courier stopped."""

    def __init__(self, client: Any, journal: Path, uri: str, phase: str, abandoned: bool) -> None:
        self._client, self._journal, self._abandoned = client, journal, abandoned
        self._state = read_json(state_path(journal)) if abandoned else {}
        if self._state.get("uri") not in (None, uri):  # half of it is at another server: leave it to that one
            raise _Elsewhere(self._state["uri"])
        self._state |= {"uri": uri, "phase": phase, "error": None}
        self.ended = False

    def carry(self, final: bool = False) -> None:
        """Send the complete lines written so far; `final` ends a run as KILLED that the stage did not end."""
        with open(self._journal, "rb") as file:
            file.seek(self._state.get("sent", 0))
            data = file.read()
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        batch: list[dict[str, Any]] = []
        size = sent = 0
        for line in lines:
            event = json.loads(line)
            if batch and (event["event"] != "metrics" or size + len(event["values"]) > _BATCH):
                self._send_metrics(batch)
                self._sent(sent)
                batch, size, sent = [], 0, 0
            if event["event"] == "metrics":
                batch.append(event)
                size += len(event["values"])
                sent += len(line)
            else:
                getattr(self, f"_send_{event['event']}")(event)
                self._sent(len(line))
        if batch:
            self._send_metrics(batch)
            self._sent(sent)
        if final and not self.ended and self._state.get("run_id"):
            self._send_end({"status": "KILLED", "time": milliseconds()})
        if self.ended or final:
            self._journal.unlink()
            state_path(self._journal).unlink(missing_ok=True)

    def _sent(self, size: int) -> None:
        self._state["sent"] = self._state.get("sent", 0) + size
        if not self.ended:
            write_json(state_path(self._journal), self._state)

    def _send_start(self, event: dict[str, Any]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelInput, Param

        client = self._client
        known = client.get_experiment_by_name(event["experiment"])
        experiment = known.experiment_id if known else client.create_experiment(event["experiment"])
        run = self._earlier_run(experiment, event) if self._abandoned else None
        if run is None:
            created = client.create_run(
                experiment, start_time=event["time"], tags=event["tags"], run_name=event["run_name"]
            )
            run = created.info.run_id
        self._state |= {"run_id": run, "experiment": experiment}
        write_json(state_path(self._journal), self._state)
        run_file, invocation = Path(event["run_file"]), event["tags"]["ratchet.invocation"]
        if read_json(run_file).get("invocation") == invocation:  # else its scratch is gone or somebody else's
            write_json(run_file, {"invocation": invocation, "run_id": run})
        params = [Param(_name(name), value[:6000]) for name, value in event["params"].items()]
        for first in range(0, len(params), 100):
            client.log_batch(run, params=params[first : first + 100])
        datasets = [
            DatasetInput(
                Dataset(name=item["name"], digest=item["digest"][:36], source_type="local", source=item["name"]),
                [InputTag("mlflow.data.context", "input"), InputTag("sha256", item["digest"])],
            )
            for item in event["datasets"]
        ]
        models = [LoggedModelInput(model) for model in self._models(experiment, event["parents"])]
        if datasets or models:
            client.log_inputs(run, datasets=datasets, models=models)

    def _earlier_run(self, experiment: str, event: dict[str, Any]) -> str | None:
        invocation = event["tags"]["ratchet.invocation"]
        runs = self._client.search_runs([experiment], f"tags.`ratchet.invocation` = '{invocation}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _models(self, experiment: str, digests: list[str]) -> list[str]:
        """The newest LoggedModel of each output digest; a parent that MLflow never heard of has none."""
        found = []
        for digest in digests:
            models = self._client.search_logged_models(
                [experiment],
                f"tags.`ratchet.output` = '{digest}'",
                max_results=1,
                order_by=[{"field_name": "creation_timestamp", "ascending": False}],
            )
            found += [model.model_id for model in models]
        return found

    def _send_metrics(self, events: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(_name(name), value, event["time"], event["step"])
            for event in events
            for name, value in event["values"].items()
        ]
        for first in range(0, len(metrics), _BATCH):
            self._client.log_batch(self._state["run_id"], metrics=metrics[first : first + _BATCH])

    def _send_output(self, event: dict[str, Any]) -> None:
        from mlflow.entities import LoggedModelOutput

        run = self._state["run_id"]
        model = self._client.create_logged_model(
            self._state["experiment"],
            name=event["name"],
            source_run_id=run,
            tags={"ratchet.output": event["digest"], "ratchet.path": event["path"], **event["tags"]},
        )
        self._client.finalize_logged_model(model.model_id, "READY")
        self._client.log_outputs(run, [LoggedModelOutput(model.model_id, step=0)])
        self._state["model_id"] = model.model_id

    def _send_end(self, event: dict[str, Any]) -> None:
        self._client.set_terminated(self._state["run_id"], status=event["status"], end_time=event["time"])
        self.ended = True


def _connect(root: Path, report: Callable[[str], None]) -> Any:
    """An MLflow client whose server or database has answered. Raises what went wrong instead."""
    uri = tracking_uri(root)
    if uri.startswith(("http://", "https://")):
        report("connecting")
        _knock(uri)
    if uri.startswith(_SQLITE):
        report("connecting")
        _try_lock(Path(uri.removeprefix(_SQLITE)))
    report("importing")
    from mlflow import MlflowClient

    if uri.startswith(_SQLITE):
        _make_database(Path(uri.removeprefix(_SQLITE)), lambda: report("creating"))
    report(_connected_phase(uri))
    client = MlflowClient(tracking_uri=uri)
    client.get_experiment("0")
    return client


def _connected_phase(uri: str) -> str:
    return "local" if uri.startswith(_SQLITE) else "connected"


def _knock(uri: str) -> None:
    """See that something answers HTTP at `uri`, before the time to import MLflow is spent on it."""
    with suppress(urllib.error.HTTPError):
        urllib.request.urlopen(re.sub(r"(?<=://)[^/@]+@", "", uri), timeout=TIMEOUT).close()


def _try_lock(database: Path) -> None:
    """See that `database`, if it is there, can be written and is not locked for long."""
    if database.exists():
        connection = sqlite3.connect(database, timeout=TIMEOUT, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        finally:
            connection.close()


def _make_database(database: Path, announce: Callable[[], None]) -> None:
    """Create the tables of a new database, 7 to 10 s of work, once: a second process waits for the first.

    They are made under another name, so that a database that exists is a whole one.
    """
    if database.exists():
        return
    announce()
    from mlflow import MlflowClient

    database.parent.mkdir(parents=True, exist_ok=True)
    with open(database.with_name(f"{database.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            part = database.with_name(f"{database.name}.part")
            part.unlink(missing_ok=True)
            MlflowClient(tracking_uri=f"sqlite:///{part}").get_experiment("0")
            os.replace(part, database)


def _abandoned(root: Path, own: Path | None) -> list[Path]:
    journals = [path for path in (root / SPOOL).glob("*.jsonl") if path != own]
    return sorted(journals, key=lambda path: path.stat().st_mtime)


def _deliver_abandoned(client: Any, root: Path, own: Path | None, uri: str) -> None:
    for journal in _abandoned(root, own):
        with suppress(FileNotFoundError), open(journal, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # its stage is alive
                continue
            try:
                _Delivery(client, journal, uri, "", abandoned=True).carry(final=True)
            except _Elsewhere:
                continue
            except Exception:
                client.get_experiment("0")  # raises when the server is gone, which is not the journal's fault
                _log(root, traceback.format_exc())
                os.replace(journal, journal.with_suffix(".rejected"))


def _log(root: Path, text: str) -> None:
    path = root / ".ratchet/logs/mlflow.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(scrub(text))


def courier(own: Path | None, root: Path) -> None:
    """Deliver abandoned journals, then `own` as the stage writes it, until the stage ends or dies."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the stage tells how it ended; these would lose that
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    uri = scrub(tracking_uri(root))

    def report(phase: str, error: str | None = None) -> None:
        if own is not None:
            write_json(state_path(own), {**read_json(state_path(own)), "phase": phase, "error": error})

    try:
        client = _connect(root, report)
        _deliver_abandoned(client, root, own, uri)
        if own is None:
            return
        delivery = _Delivery(client, own, uri, _connected_phase(uri), abandoned=False)
        alive = True
        while not delivery.ended:
            delivery.carry(final=not alive)
            if not alive:
                return
            if not delivery.ended and select.select([sys.stdin], [], [], EVERY)[0]:
                alive = bool(os.read(sys.stdin.fileno(), 4096))
    except Exception as error:  # MLflow being down, full or broken never fails a stage
        reason = scrub(f"{type(error).__name__}: {error}".splitlines()[0])[:300]
        report("failed", reason)
        _log(root, traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    courier(Path(sys.argv[1]) if len(sys.argv) > 1 else None, Path.cwd())
    os._exit(0)  # taking the interpreter down in good order would cost the waiting stage another 0.2 s

"""The contract of stages: what `python -m tasks.NAME` does around a stage's own `compute`.

    class Params(Strict): ...
    def compute(stage: Execution) -> None: ...
    if __name__ == "__main__":
        main(compute)

A stage works in `.ratchet/scratch/STAGE/INPUT_DIGEST/`, which outlives a kill. A finished output stays there
with its manifest and lineage record; publishing copies it to its place, so that a lost output is published
again, not computed. How an execution ended stands in `.ratchet/outcomes/STAGE.json` (see tasks/outcome.py).
Exit codes: 0, 1 for a fault of the program or machine, 2 for something the user can mend, 128 + signal.
"""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import platform
import shutil
import sys
import traceback
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from pipelines.errors import UserError
from tasks import torchrun
from tasks.execution import Execution
from tasks.graph import Graph, Node
from tasks.outcome import Ending, in_words
from tasks.recording import scrub
from tasks.settings import PARAMS, Settings

__all__ = ["Execution", "main"]

SCRATCH = Path(".ratchet/scratch")
_RECORD = "record.json"
_RUN = "run.json"
_NOT_WORK = {_RUN, _RECORD, "manifest.json", "output"}


def main(compute: Callable[[Execution], None], argv: list[str] | None = None, *, network: bool = False) -> NoReturn:
    """Run the stage whose module defines `compute`; `argv` holds the key of a `foreach` stage, if it is one.

    With `network`, libraries may reach model hubs; every other stage is kept offline.
    """
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of a set of strings would differ from run to run
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    faulthandler.enable()
    running = sys.modules[compute.__module__]
    module = running.__spec__.name
    sys.modules[module] = running  # otherwise reading its `Params` would import the stage a second time
    group = module.rpartition(".")[2]
    arguments = sys.argv[1:] if argv is None else argv
    stage = "@".join([group, *arguments[:1]])
    os.environ |= {"DO_NOT_TRACK": "true", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    if not network:
        os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if torchrun.is_follower():
        torchrun.follow(compute, Path.cwd(), stage)
        sys.exit()
    processes = 1 if torchrun.is_started() else torchrun.wanted(Path.cwd(), stage)
    if processes > 1:
        torchrun.launch(module, stage, processes, arguments)
    ending = Ending(stage)
    ending.watch_signals()
    try:
        _run(compute, ending, group)
    except _Busy as error:
        ending.refuse(str(error))
    except (UserError, FloatingPointError) as error:  # numbers that went astray are no fault of the code either
        ending.fail("user", scrub(str(error)), 2)
    except BaseException as error:  # whatever it was, the outcome file has to say so
        print(scrub(traceback.format_exc()), file=sys.stderr, end="")
        ending.fail("internal", in_words(error), 1)
    ending.leave()


class _Busy(UserError):
    """Another process runs this stage; how the stage ended is that one's to say."""


@dataclass(frozen=True)
class _Work:
    """What is known about an execution before it computes."""

    root: Path
    graph: Graph
    node: Node
    settings: Settings
    used: dict[str, Any]  # dotted parameter -> value: what dvc.yaml says the stage uses
    code: dict[str, Any]  # the stage's entry of code.lock
    inputs: dict[str, str]  # dependency -> tree SHA-256
    digest: str
    scratch: Path
    lock: IO[str]  # held until the process ends


def _run(compute: Callable[[Execution], None], ending: Ending, group: str) -> None:
    from tasks import publishing

    work = _prepare(Path.cwd(), ending.stage, group)
    ending.note(input_digest=work.digest)
    if publishing.finished_files(work.scratch) is not None and (work.scratch / _RECORD).exists():
        ending.close()
        torchrun.lead(None)
        _publish(work)
        ending.succeed("republished", f"this work was finished before; published {work.node.outs[0]} again")
    else:
        _execute(compute, ending, work)


def _prepare(root: Path, stage: str, group: str) -> _Work:
    """Check everything that can be checked without computing, and take the stage's lock."""
    from tasks import codelock, digests, graph, lineage, settings

    stages = graph.load_graph(root)
    if stage not in stages.nodes:
        raise UserError(f"dvc.yaml has no stage {stage}; it has {', '.join(stages.nodes)}")
    node = stages.nodes[stage]
    declared = node.params.get(PARAMS, ())
    checked = settings.load_params(root, only=declared)
    os.environ |= {name: str(checked.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # stages run side by side: a waiting thread must not hold a core
    used = settings.values(root, declared)
    for dep in node.deps:
        if not (root / dep).exists():
            makers = [maker.name for maker in stages.producers(dep)]
            todo = f"run `ratchet run {' '.join(makers)}` first" if makers else "put it there or correct dvc.yaml"
            raise UserError(f"input {dep} does not exist; {todo}")
    lineage.read(root)  # a log that was damaged is said now, not when there is a result to record
    code = codelock.read(root).get(group, {})
    changes = codelock.explain(code, codelock.current(root, group))
    if changes:
        raise UserError(f"code.lock is out of date ({'; '.join(changes[:3])}); run `ratchet plan`, then this again")
    inputs = {dep: digests.tree_sha256(root / dep) for dep in node.deps}
    digest = lineage.sha256(lineage.canonical({"stage": stage, "params": used, "code": code, "inputs": inputs}))
    scratch = SCRATCH / stage / digest[:16]
    scratch.mkdir(parents=True, exist_ok=True)
    return _Work(root, stages, node, checked, used, code, inputs, digest, scratch, _lock(scratch.parent, stage))


def _lock(directory: Path, stage: str) -> IO[str]:
    lock = open(directory / ".lock", "a+")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        raise _Busy(f"already running as process {lock.read().strip()}; wait for it or stop it") from None
    lock.truncate(0)
    lock.write(str(os.getpid()))
    lock.flush()
    return lock


def _execute(compute: Callable[[Execution], None], ending: Ending, work: _Work) -> None:
    from tasks import digests, lineage, publishing, recording

    node, scratch, out = work.node, work.scratch, work.node.outs[0]
    is_resumed = any(entry.name not in _NOT_WORK for entry in scratch.iterdir())
    earlier = recording.read_json(scratch / _RUN)
    resumed_from = (earlier.get("run_id") or earlier.get("invocation")) if is_resumed else None
    shutil.rmtree(scratch / "output", ignore_errors=True)
    (scratch / publishing.MANIFEST).unlink(missing_ok=True)
    (scratch / "output").mkdir()

    invocation, started, commit = uuid.uuid4().hex, lineage.now(), lineage.git_state(work.root)
    dependencies = _dependencies(work)
    recorder = recording.Recorder(work.root, node.name, invocation)
    recording.write_json(scratch / _RUN, {"invocation": invocation, "run_id": None})
    ending.note(resumed_from=resumed_from)
    ending.record(recorder)
    recorder.start(
        scratch / _RUN,
        experiment=recording.experiment_name(work.root),
        run_name=node.name,
        tags=recording.handed_down_tags()
        | {
            "ratchet.stage": node.name,
            "ratchet.invocation": invocation,
            "ratchet.input_digest": work.digest,
            "git.commit": commit["commit"] or commit["note"],
            "git.dirty": {None: "unknown", True: "true", False: "false"}[commit["dirty"]],
        }
        | ({"resumed_from": resumed_from} if resumed_from else {}),
        params=recording.flatten(work.used),
        datasets=[{"name": entry["name"], "digest": entry["digest"]["sha256"]} for entry in dependencies],
        parents=[entry["digest"]["sha256"] for entry in dependencies if entry["annotations"]["stage"]],
    )
    execution = Execution(node, work.settings, scratch, recorder, is_resumed)
    torchrun.lead(scratch)
    loaded_before = set(sys.modules)
    print(f"{node.name}: {'resuming' if is_resumed else 'computing'} on inputs {work.digest[:16]}", flush=True)
    ending.computing(execution)
    compute(execution)

    ending.close()
    publishing.check_output(scratch / "output", work.root)
    _check_closure(work, loaded_before)
    files = digests.tree(scratch / "output")
    recorder.metrics(0, {f"final/{name}": value for name, value in execution.results.items()})
    if publishing.is_checkpoint(files):
        digest = digests.tree_digest(files)
        recorder.output(name=node.name, path=out, digest=digest, tags={"ratchet.stage": node.name})
    run_id, model_id = recorder.ids()
    record = lineage.statement(
        stage=node.name,
        out=out,
        files=files,
        params=work.used,
        seed=work.settings.seed,
        internal=_circumstances(work),
        dependencies=[
            *dependencies,
            *execution.sources,
            *lineage.code_entries(work.node.group, work.code, commit),
        ],
        invocation=invocation,
        started=started,
        finished=lineage.now(),
        byproducts={
            "mlflow_run_id": run_id,
            "mlflow_model_id": model_id,
            "rows": execution.rows,
            "results": execution.results,
            "resumed_from": resumed_from,
            "input_digest": work.digest,
        },
    )
    (scratch / _RECORD).write_bytes(lineage.canonical(record))
    publishing.write_manifest(scratch, files)
    _publish(work)
    ending.succeed("succeeded", f"published {out}")


def _publish(work: _Work) -> None:
    """Log the lineage record, then put the output in place: what can be seen there is always on record."""
    from tasks import lineage, publishing

    out = Path(work.node.outs[0])
    lineage.append(work.root, json.loads((work.scratch / _RECORD).read_bytes()))
    sibling = (
        Path(out.parts[0]) / f".{work.node.name}.publishing"
        if len(out.parts) > 1
        else out.with_name(f".{out}.publishing")
    )
    publishing.publish(work.scratch / "output", out, sibling)


def _dependencies(work: _Work) -> list[dict[str, Any]]:
    """The inputs: an entry per output of another stage, one with all its files per input no stage made."""
    from tasks import digests

    entries = []
    for dep, digest in work.inputs.items():
        makers = work.graph.producers(dep)
        parts = [(out, maker.name) for maker in makers for out in maker.outs if out.startswith(f"{dep}/")]
        if parts:  # a directory above several outputs, such as data/rl
            entries += [
                {
                    "name": out,
                    "digest": {"sha256": digests.tree_sha256(work.root / out)},
                    "annotations": {"stage": name},
                }
                for out, name in parts
            ]
        elif makers:
            entries.append({"name": dep, "digest": {"sha256": digest}, "annotations": {"stage": makers[0].name}})
        else:
            files = digests.tree(work.root / dep)
            entries.append({"name": dep, "digest": {"sha256": digest}, "annotations": {"stage": None, "files": files}})
    return entries


def _circumstances(work: _Work) -> dict[str, Any]:
    """What can change the bytes of a result although code, parameters and inputs are equal."""
    torch = sys.modules.get("torch")
    found: dict[str, Any] = {
        "threads": work.settings.threads,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "packages": work.code.get("packages", {}),
        "cpu_capability": torch.backends.cpu.get_cpu_capability() if torch else None,
        "accelerator": None,
    }
    if torch and torch.cuda.is_initialized():
        found["accelerator"] = torch.cuda.get_device_name()
    return found


def _check_closure(work: _Work, loaded_before: set[str]) -> None:
    """Refuse a result that depends on project code which code.lock does not watch for this stage."""
    from tasks import codelock
    from tasks.publishing import ContractError

    new = [sys.modules[name] for name in set(sys.modules) - loaded_before]
    files = [module.__file__ for module in new if getattr(module, "__file__", None)]
    outside = codelock.loaded_outside(work.root, work.node.group, files)
    if outside:
        raise ContractError(
            f"the stage loaded {', '.join(outside)}, which its import closure in code.lock does not hold; "
            "import it by a plain import statement or through pipelines.registry.load with a literal name"
        )

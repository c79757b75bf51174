from __future__ import annotations

import json
import struct
import time
from pathlib import Path

from flows.display import PlainDisplay, Rate, duration, read_progress, summary
from flows.driver import Result
from flows.session import Outcome
from flows.table import final_checkpoint, parameter_count, table_rows
from tasks.graph import load_graph


def test_durations_are_readable() -> None:
    assert [duration(s) for s in (0.04, 59.9, 60, 245.4, 7809)] == ["0.0 s", "59.9 s", "1:00", "4:05", "2:10:09"]


def test_a_rate_counts_from_the_first_sighting_of_this_run() -> None:
    rate = Rate()
    assert rate.per_second is None
    rate.see(400, 100.0)  # resumed at step 400
    rate.see(420, 104.0)
    assert rate.per_second == 5.0
    rate.see(10, 110.0)  # a second phase of the stage counts anew
    assert rate.per_second is None


def test_progress_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / ".ratchet/progress/sft.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"done": 1, "total": 2, "updated": time.time() - 60}))
    assert read_progress(tmp_path, "sft", time.time()) == {}
    path.write_text("{ half")
    assert read_progress(tmp_path, "sft", time.time()) == {}
    path.write_text(json.dumps({"done": 1, "total": 2, "updated": time.time()}))
    assert read_progress(tmp_path, "sft", time.time())["done"] == 1


def test_plain_output_says_what_happens(capsys, tmp_path: Path) -> None:
    display = PlainDisplay()
    display.started("sft", ["parameter sft.lr 1 -> 2"])
    display.finished(Outcome("sft", "done", seconds=61.0))
    display.finished(Outcome("base", "skipped"))
    assert capsys.readouterr().out == "sft: started (parameter sft.lr 1 -> 2)\nsft: done in 1:01\n"
    assert summary(Outcome("rl@1", "restored", seconds=1.0)) == "restored from cache in 1.0 s"


def test_exit_codes_follow_the_kind_of_failure() -> None:
    mistake, bug = Outcome("a", "failed", "user"), Outcome("b", "failed", "internal")
    assert Result([Outcome("c", "done")]).exit_code == 0
    assert Result([mistake]).exit_code == 2
    assert Result([mistake, bug]).exit_code == 1


def test_the_table_reads_accuracies_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text(
        "stages:\n  base: {cmd: a, outs: [data/base]}\n  distill: {cmd: b, deps: [data/base], outs: [data/distill]}\n"
        "  evaluate: {cmd: c, deps: [data/base, data/distill], outs: [data/evaluate]}\n"
    )
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "embedding": {"dtype": "F32", "shape": [100, 40], "data_offsets": [0, 16000]},
            "scale": {"dtype": "F32", "shape": [], "data_offsets": [16000, 16004]},
        }
    ).encode()
    (tmp_path / "data/distill").mkdir(parents=True)
    (tmp_path / "data/distill/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16004)
    (tmp_path / "data/evaluate").mkdir()
    (tmp_path / "data/base").mkdir()
    accuracy = {"mean": 0.9, "low": 0.85, "high": 0.95, "n": 80}
    (tmp_path / "data/evaluate/metrics.json").write_text(
        json.dumps({"checkpoints": {"student": {"accuracy": accuracy}, "base": {"accuracy": accuracy}}})
    )
    graph = load_graph(tmp_path)
    assert parameter_count(tmp_path / "data/distill") == 4001
    assert table_rows(tmp_path, graph, {"distill": 2.0})[1] == ["distill", "0.900  (0.850 to 0.950)", "0.00 M", "2.0 s"]
    assert final_checkpoint(tmp_path, graph) == "data/distill"

"""SIGKILL of a stage's process in the middle of its training, through the command line."""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import time

import psutil

from tests.end_to_end.conftest import RATCHET, Project


def kill_while_training(project: Project, stage: str) -> None:
    """`ratchet run STAGE --force`, then kill -9 of the stage process once it has written a checkpoint."""
    # glob.glob passes over directories that vanish while it looks: a forced run clears its scratch first
    checkpoints = str(project.root / ".ratchet" / "scratch" / stage / "*" / "checkpoints" / "tick-*")
    driver = subprocess.Popen(
        [RATCHET, "run", stage, "--force"],
        cwd=project.root,
        env=project.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 300
    module = f"tasks.{stage.partition('@')[0]}"
    while time.monotonic() < deadline and driver.poll() is None:
        if glob.glob(checkpoints):
            for process in psutil.Process(driver.pid).children(recursive=True):
                if module in process.cmdline():
                    os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.01)
    output, _ = driver.communicate(timeout=60)
    assert driver.returncode == 1, output
    assert stage in output, json.dumps(output)

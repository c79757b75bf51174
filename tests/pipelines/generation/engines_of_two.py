"""What `torchrun` runs for test_team_engines.py: two processes sample together; each writes what it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from pipelines.errors import UserError
from pipelines.generation.engine import Prompt
from pipelines.generation.engines import FirstsEngine, TeamEngine
from pipelines.generation.native import NativeEngine
from pipelines.generation.settings import NativeEngineParams, Sampling
from pipelines.training.team import gather_team

PROMPTS = [Prompt([5, 6, 7], (1, 2)), Prompt([8], (3,)), Prompt(list(range(3, 20)), (4, 5, 6))]
SAMPLING = Sampling(temperature=1.0, max_new_tokens=12)


class Noted(NativeEngine):
    """The native engine, which notes who opens it and which weights it is given."""

    @classmethod
    def open(cls, directory: Path, params: NativeEngineParams) -> NativeEngine:
        (directory / f"opened-by-{torch.distributed.get_rank()}").touch()
        return super().open(directory, params)


def drawn(engine) -> list:
    first = engine.generate(PROMPTS, SAMPLING, ["entropy"])
    weights = {
        name: value * 0.5 for name, value in NativeEngine.open(Path(sys.argv[1]), PARAMS).model.state_dict().items()
    }
    engine.load(weights, 7)
    second = engine.generate(PROMPTS, SAMPLING)
    engine.close()
    return [first.tokens, first.measures, second.tokens, second.logprobs, second.policy_version]


PARAMS = NativeEngineParams(name="native")

if __name__ == "__main__":
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    team = gather_team()
    found = {
        "shared": drawn(TeamEngine(NativeEngine.open(directory, PARAMS))),
        "first": drawn(FirstsEngine(Noted, directory, PARAMS)),
    }
    shared = TeamEngine(NativeEngine.open(directory, PARAMS))
    found["of nothing"] = shared.generate([], SAMPLING).tokens
    try:  # only the process that is dealt the longest prompt meets it
        shared.generate([*PROMPTS, Prompt([5] * 120, (7,))], SAMPLING)
    except UserError as error:
        found["too long"] = str(error)
    (directory / f"found-{team.rank}.json").write_text(json.dumps(found))
    team.wait()

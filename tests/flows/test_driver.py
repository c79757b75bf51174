from toy_project import STAGES, Toy


def test_everything_is_built_once_and_then_nothing_is_done(toy: Toy) -> None:
    toy.ratchet("run")
    assert toy.states() == dict.fromkeys(STAGES, "fresh")
    assert toy.total_calls() == {**dict.fromkeys([s.split("@")[0] for s in STAGES], 1), "rl": 2}
    again = toy.ratchet("run")
    assert "Nothing to do" in again.stdout
    assert toy.calls("base") == 1

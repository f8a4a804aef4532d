"""A few hundred damaged folders; ``python -m bench.fuzz`` runs ten thousand."""

from __future__ import annotations

import pytest

from bench import fuzz


@pytest.mark.parametrize("seed", range(4))
def test_damaged_evidence_never_crashes_or_runs_code(seed: int) -> None:
    report = fuzz.run(40, seed=1000 + seed)
    assert report.failures == []
    assert report.count == 40 and report.refused < 20  # most files are damaged, not destroyed


def test_the_fuzzer_detects_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception, code that runs, and an endless input are failures."""
    import os

    def broken(paths: object) -> None:
        raise AttributeError("x")

    monkeypatch.setattr(fuzz, "examine", broken)
    assert len(fuzz.run(2).failures) == 2

    def runs(paths: object) -> None:
        os.environ[fuzz.CANARY] = "ran"
        raise fuzz.MoediagError("refused, but too late")

    monkeypatch.setattr(fuzz, "examine", runs)
    assert fuzz.run(1).failures == [(0, "code ran")]
    monkeypatch.setattr(fuzz, "SECONDS", 1)

    def endless(paths: object) -> None:
        while True:
            pass

    monkeypatch.setattr(fuzz, "examine", endless)
    assert fuzz.run(1).failures == [(0, "more than 1 s")]

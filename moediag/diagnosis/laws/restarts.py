"""A restarted rank continues with the state that it saved."""

from __future__ import annotations

from collections.abc import Iterator

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law, recorded
from moediag.evidence.law_model import LawCheck
from moediag.result.wording import plural, ranks


@law(suspects=True)
def restart_forgets(facts: Facts) -> Findings:
    """A restarted rank began with the weights that it had after a save of an earlier attempt, and
    its optimizer with other state, step counts or settings."""
    found: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank, own in facts.of(recorded).items():
        earlier = facts.evidence.earlier.get(rank, ())
        for check in own.checks:
            saved = _saved(check, earlier) if not check.count else None
            for text in _differences(saved, check) if saved is not None else ():
                assert saved is not None
                said = (
                    f"began with its weights of step {saved.step} of an earlier attempt, after "
                    f"a save, and {check.optimizer} {text}."
                )
                found.setdefault((said, check.names), []).append(rank)
    for (text, names), who in found.items():
        yield Suspicious(f"After the restart, {ranks(who)} {text}", names)


def _saved(check: LawCheck, earlier: tuple[LawCheck, ...]) -> LawCheck | None:
    """The newest state after a save that has the weights with which ``check`` begins."""
    if not check.params or None in check.params:
        return None
    same = (one for one in reversed(earlier) if one.key == check.key and one.count)
    return next((one for one in same if one.params == check.params), None)


def _differences(saved: LawCheck, check: LawCheck) -> Iterator[str]:
    lost, other = [], []
    for name, expected in saved.state.items():
        got = check.state.get(name, (None,) * len(expected))
        pairs = [(e, g) for e, g in zip(expected, got, strict=True) if e is not None]
        if pairs and all(g is None for _, g in pairs):
            lost.append(name.strip())
        elif any(e != g for e, g in pairs):
            other.append(name.strip())
    if lost:
        yield f"without {', '.join(lost)} of {plural(len(check.pieces), 'parameter')}"
    if other:
        yield f"with other values of {', '.join(other)}"
    numbers = [
        f"{name} {now[name]} instead of {before[name]}"
        for before, now in zip(saved.hyper, check.hyper, strict=False)
        for name in before
        if name in now and now[name] != before[name]
    ]
    if numbers:
        yield f"with {', '.join(dict.fromkeys(numbers))}"

"""The verdict on a resumed run of a user's program, and the sentence that says what was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from moediag.protocol import recorded_state as words
from moediag.records import dataclass
from moediag.result import Cell, Confidence, Table, Verdict
from moediag.result.wording import error_size, plural, ranks

if TYPE_CHECKING:
    from moediag.protocol.recorded_state import Lost, ResumedRun

_FEW = 2  # names in a sentence
_LISTED = 4  # names of one kind in the table
OUTSIDE = "outside-the-state"
_PLURAL = {
    words.PARAMETER: "parameters", words.MAIN: "main weights", words.BUFFER: "buffers",
    words.STATE: "optimizer states", words.COUNT: "step counts", words.COPY: "copied weights",
    words.SCHEDULER: "values of the scheduler", words.SCALER: "values of the loss scaler",
    words.SETTING: "optimizer settings", words.FROZEN: "frozen flags",
    words.MODE: "modes of modules", words.GENERATOR: "random states", words.BATCH: "batches",
}  # fmt: skip
_SINGULAR = {kind: kind for kind in _PLURAL} | {
    words.COPY: "copied weight", words.GENERATOR: "random state",
    words.SCHEDULER: "value of the scheduler", words.SCALER: "value of the loss scaler",
}  # fmt: skip
# Why, in words; {it} and {was} agree with the number of values, {other} is what the record knows.
_WHY = {
    words.NOT_SAVED: "{It} {was} in no save that was seen{other}.",
    words.NOT_LOADED: "{It} {was} saved, but the resumed run read {it} in no load that was seen.",
    words.NOT_PUT: "The resumed run read {it}, and no call that was seen put {it} back.",
    words.RESET: "{It} {was} put back{other}, and changed afterwards.",
    words.DRAWN: "{It} {was} put back{other}, and numbers were drawn since, as iter(DataLoader) "
    "draws a seed.",
    words.ELSEWHERE: "It now holds what {other} held at the save.",
    words.MOVED: "Its rows were put back in another order: {other}.",
    words.FROM_RANK: "It now holds what {other} held at the save.",
    words.INVENTED: "{It} did not exist at the save.",
}
_NEXT = {
    words.NOT_SAVED: "Save {what} in the checkpoint, and restore {it} before the first step.",
    words.NOT_LOADED: "Read {what} from the checkpoint, and restore {it} before the first step.",
    words.NOT_PUT: "Restore {what} from what was read, before the first step.",
    words.RESET: "Look between that line and the first step: what sets it again must come before.",
    words.DRAWN: "Restore {what} again once the first batch was fetched.",
    words.ELSEWHERE: "Compare the order or the names at the save with those at the load.",
    words.MOVED: "Compare how the checkpoint lays out the rows with how they are read.",
    words.FROM_RANK: "Each rank must read its own part of the checkpoint.",
    words.RESTARTED: "Save the position of the sampler or data loader, and continue from it.",
    words.INVENTED: "Look at what the load creates that training had not.",
}

# Their values are no text that a person reads.
_FINGERPRINTS = (
    words.GENERATOR, words.STATE, words.PARAMETER, words.MAIN, words.BUFFER, words.COPY,
)  # fmt: skip

# What a program saves and restores at once.
_WHAT = {
    words.STATE: "the optimizer's state", words.COUNT: "the optimizer's state",
    words.SETTING: "the optimizer's state", words.SCHEDULER: "the scheduler's state",
    words.SCALER: "the loss scaler's state", words.GENERATOR: "the random state",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Said:
    """What a comparison shows."""

    verdict: Verdict
    confidence: Confidence
    text: str
    pattern: str = ""
    next_step: str = ""
    notes: tuple[str, ...] = ()


def said(found: Mapping[int, ResumedRun]) -> Said:
    """Returns the verdict on the resumed runs of all ranks."""
    some = next(iter(found.values()))
    lost = _merged(found)
    drawn = [one for one, _ in lost if one.kind == words.GENERATOR]
    certain = [(one, who) for one, who in lost if one.kind != words.GENERATOR]
    later = [one for one in found.values() if one.later is not None]
    changed = any(loss for one in found.values() for loss in one.losses)
    notes = tuple(_notes(found))
    if certain:
        text = f"After resuming from the save at step {some.after}, "
        first, *others = (_sentence(one, who, found) for one, who in certain[:2])
        text += " ".join([first, *(one[:1].upper() + one[1:] for one in others)])
        if len(certain) > 2:
            text += f" Other differences: {', '.join(_counted(one) for one, _ in certain[2:])}."
        most = certain[0][0]
        pattern = f"{most.kind} {most.why}".strip()
        text = f"{text} {_consequence(found)}".strip()
        return Said(Verdict.RESUME_DRIFT, Confidence.HIGH, text, pattern, _next(most), notes)
    if later or changed:
        return _outside(found, drawn, notes)
    noise = _noise(found)
    if drawn:
        notes += (
            "The random generators were not restored; nothing that was compared depended on them.",
        )
    if not all(one.compared for one in found.values()):
        text = "The state at the save and the one after resuming could not be compared."
        return Said(Verdict.INCONCLUSIVE, Confidence.LOW, text, notes=notes)
    if noise:
        text = f"Two uninterrupted runs already differ in {noise}, so it is not known whether "
        text += "resuming changes them. Everything else equals the state at the save."
        advice = "Fix the seeds of the program, and of its data, so that two runs are equal."
        return Said(Verdict.INCONCLUSIVE, Confidence.LOW, text, next_step=advice, notes=notes)
    total = sum(one.compared for one in found.values())
    if some.layouts:
        text = f"After resuming on {plural(some.layouts[1], 'rank')}, {plural(total, 'value')} of "
        text += "the state (weights, optimizer, scheduler, …), each put together from all ranks, "
        text += f"equal those of {plural(some.layouts[0], 'rank')} at the save at step "
        text += f"{some.after}. Steps are not compared: other ranks round otherwise."
        return Said(Verdict.CLEAN, Confidence.HIGH, text, notes=notes)
    text = f"After resuming, {plural(total, 'value')} of the state (weights, optimizer, "
    text += f"scheduler, generators, …) {_on(found)}equal those at the save at step {some.after}, "
    text += f"and {_span(some)} of an uninterrupted run."
    return Said(Verdict.CLEAN, Confidence.HIGH, text, notes=notes)


def _outside(
    found: Mapping[int, ResumedRun], drawn: Sequence[Lost], notes: tuple[str, ...]
) -> Said:
    """Everything that was restored is right, and training differs nevertheless."""
    if drawn:
        text = f"After resuming, {_sentence(drawn[0], tuple(found), found)} {_consequence(found)}"
        pattern = f"{drawn[0].kind} {drawn[0].why}".strip()
        return Said(
            Verdict.RESUME_DRIFT, Confidence.HIGH, text.strip(), pattern, _next(drawn[0]), notes
        )
    text = "Every value of the state that was compared equals that at the save, and training still "
    text += f"differs: something else that it depends on was not restored. {_consequence(found)}"
    return Said(
        Verdict.RESUME_DRIFT, Confidence.MEDIUM, text.strip(), OUTSIDE,
        "Look for counters, lists or flags of the program itself that a step reads.", notes,
    )  # fmt: skip


# ------------------------------------------------------------------------ sentences


def _merged(found: Mapping[int, ResumedRun]) -> list[tuple[Lost, tuple[int, ...]]]:
    """What was lost, with the ranks that lost it, in the order of the first rank that did."""
    groups: dict[tuple[str, str], list[int]] = {}
    first: dict[tuple[str, str], Lost] = {}
    for rank, run in found.items():
        for one in run.lost:
            groups.setdefault((one.kind, one.why), []).append(rank)
            first.setdefault((one.kind, one.why), one)
    return [(first[key], tuple(who)) for key, who in groups.items()]


def _sentence(one: Lost, who: Sequence[int], found: Mapping[int, ResumedRun]) -> str:
    some = next(iter(found.values()))
    where = f" on {ranks(who)}" if len(found) > 1 and len(who) < len(found) else ""
    step = some.after + 1
    if one.kind == words.BATCH:
        text = (
            f"step {step}{where} trains on different samples than step {step} without interruption"
        )
        return f"{text}: on those of {one.other}." if one.other else f"{text}."
    few = len(one.names) == 1
    names = _listed(one.names)
    value = f" ({one.got or 'none'} instead of {one.expected or 'none'})" if _plain(one) else ""
    far = f", relative difference {one.distance:.2g}" if one.distance is not None else ""
    text = f"{_counted(one)}{where} "
    text += "differs from its value" if few else "differ from their values"
    text += f" at the save: {names}{value}{far}."
    why = _WHY.get(one.why)
    if why is None:
        return text
    other = one.other
    if one.why == words.NOT_SAVED:
        other = f": the checkpoint has {other}" if other else ""
    elif one.why in (words.RESET, words.DRAWN):
        other = f" at {other}" if other else ""
    it = "it" if few else "them"
    start = ("It" if few else "They") if why.startswith("{It}") else ""
    told = why.replace("{It}", start).replace("{was}", "was" if few else "were")
    told = told.replace("{it}", it).replace("{other}", other)
    if not few and one.why in (words.ELSEWHERE, words.MOVED, words.FROM_RANK):
        told = f"{one.names[0]}: {told[:1].lower()}{told[1:]}"
    return f"{text} {told}"


def _plain(one: Lost) -> bool:
    """Whether the first value is short enough to be shown."""
    return bool(one.expected or one.got) and one.kind not in _FINGERPRINTS


def _counted(one: Lost) -> str:
    number = len(one.names)
    names = _SINGULAR if number == 1 else _PLURAL
    return f"{number:,} {names.get(one.kind, one.kind)}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _FEW
    return ", ".join(names[:_FEW]) + (f" and {more:,} more" if more > 0 else "")


def _consequence(found: Mapping[int, ResumedRun]) -> str:
    some = next(iter(found.values()))
    parts = []
    losses = [
        (some.after + 1 + at, loss)
        for one in found.values()
        for at, loss in enumerate(one.losses)
        if loss
    ]
    if losses:
        step = min(step for step, _ in losses)
        most = max(loss for _, loss in losses)
        parts.append(f"the loss differs from step {step} on, by up to {error_size(most)}")
    later = [one for one in found.values() if one.later is not None]
    if later:
        first = min(later, key=lambda one: one.later or 0)
        what = ", ".join(
            _counted(one) + (f" ({one.names[0]})" if len(one.names) == 1 else "")
            for one in first.later_lost[:2]
        )
        parts.append(f"at the start of step {first.later} these differ: {what}")
    if not parts:
        return ""
    text = "; ".join(parts)
    text = f"Compared with an uninterrupted run, {text}."
    return f"{text} Two uninterrupted runs differ there by less than a tenth of that, if at all."


def _span(some: ResumedRun) -> str:
    first, last = some.after + 1, some.after + some.steps
    if first >= last:
        return f"step {first} equals that"
    return f"steps {first} to {last} equal those"


def _on(found: Mapping[int, ResumedRun]) -> str:
    return f"of {len(found)} ranks " if len(found) > 1 else ""


def _next(one: Lost) -> str:
    what = _WHAT.get(one.kind)
    told = _NEXT.get(one.why, "")
    return told.format(
        what=what or f"these {_PLURAL.get(one.kind, one.kind)}", it="it" if what else "them"
    )


def _noise(found: Mapping[int, ResumedRun]) -> str:
    total: dict[str, int] = {}
    for one in found.values():
        for kind, count in one.noise.items():
            total[kind] = total.get(kind, 0) + count
    total.pop(words.GENERATOR, None)
    return ", ".join(_PLURAL.get(kind, kind) for kind in total)


def _notes(found: Mapping[int, ResumedRun]) -> Iterable[str]:
    some = next(iter(found.values()))
    saved = dict.fromkeys(text for one in found.values() for text in one.files)
    loaded = dict.fromkeys(text for one in found.values() for text in one.loaded)
    if saved:
        yield f"Saved at step {some.after}: {_first(saved)}."
    if some.layouts:
        yield "Random states belong to a rank and are not compared between layouts."
    if some.not_known:
        yield (
            f"Not compared, because ranks hold other values or not all of it: "
            f"{_first(dict.fromkeys(some.not_known))}."
        )
    yield (
        f"Loaded by the resumed run: {_first(loaded)}."
        if loaded
        else (
            "No load of the resumed run was seen (torch.load, torch.distributed.checkpoint and "
            "safetensors are)."
        )
    )


def _first(texts: Mapping[str, None]) -> str:
    few = list(texts)[:4]
    return "; ".join(few) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")


def tables(found: Mapping[int, ResumedRun]) -> tuple[Table, ...]:
    """The first values of each kind that were lost, with their reason."""
    rows: list[tuple[Cell, ...]] = []
    left = 0
    for one, who in _merged(found):
        left += max(0, len(one.names) - _LISTED)
        for at, name in enumerate(one.names[:_LISTED]):
            first = at == 0
            rows.append(
                (
                    one.kind, name, ranks(who), one.why or "not known",
                    one.distance if first else None,
                )
            )  # fmt: skip
    if not rows:
        return ()
    return (
        Table(
            title="What differs from the save when the resumed run begins",
            columns=("kind", "name", "ranks", "why", "largest relative difference"),
            rows=tuple(rows),
            note=f"{left:,} more values are not shown." if left else "",
        ),
    )

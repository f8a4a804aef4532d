"""The learning rates of an optimizer are those of a schedule that lasts as long as the training."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Findings, Suspicious, law
from moediag.diagnosis.laws.optimizer_checks import ENOUGH, Checks, class_of, long, rate
from moediag.result.wording import at_line, listed

_PART = 6  # updates, of which the last one is without a rate


@law(suspects=True)
def learning_rate_zero(facts: Facts) -> Findings:
    """The learning rates of an optimizer were 0 in all checked steps on all ranks; or from some
    step on, for at least half of the updates that were made, or, after they fell, for a sixth. Or
    they changed for some of its groups only."""
    names: dict[str, None] = {}
    for of in long(facts):
        moves, stays = _scheduled_in_part(of)
        if stays:
            check = next(iter(of.values()))[0]
            yield Suspicious(
                f"The learning rate of {class_of(of)}{at_line(check.line)} changes in "
                f"{listed(moves)} over the checked steps, and stays the same in {listed(stays)}, "
                "which had the same rate and has the same options: a schedule sets it for some "
                "parameter groups only."
            )
        steps: dict[int, bool] = defaultdict(lambda: True)  # whether all rates are 0
        lines: dict[int, str] = {}
        for check in (check for checks in of.values() for check in checks if check.hyper):
            steps[check.step] &= all(group.get("lr") in ("0", "0.0") for group in check.hyper)
            lines[check.step] = check.line
        if steps and all(steps.values()):
            names[class_of(of)] = None
        last = max((step for step, zero in steps.items() if not zero), default=0)
        since = sorted(step for step in steps if step > last)
        # Between two checks a rate that comes back to 0, as in cycles, would move parameters.
        kept = all(
            len({check.params for check in checks if check.step > last}) == 1
            for checks in of.values()
        )
        half = len(since) > 1 and since[-1] >= 2 * since[0] and kept
        if last and (half or _fell_to_zero(of)):
            first = [one[-1].step + 1 - one[-1].zero_rates for one in of.values()]
            yield Suspicious(
                f"The learning rate of {class_of(of)} is 0 from step {min(since[0], *first)} (of "
                f"{since[-1]} or more) on{at_line(lines[since[0]])}, on all ranks: updates change "
                "nothing any more. A schedule ends too early where it counts micro-batches, or the "
                "updates of all ranks, or gets a number of steps that is divided by them."
            )
    for name in names:
        yield f"The learning rate of {name} was 0 in all checked steps: its updates change nothing."


def _fell_to_zero(of: Checks) -> bool:
    """Whether a rate that fell before is 0 in the last updates, a sixth of all or more. One that is
    switched off and on does not fall; a schedule may end an update or two early."""
    for checks in of.values():
        rates = [rate(one, 0) for one in checks]
        *_, old, new = [0.0, 0.0, *filter(None, rates)]
        zeros = checks[-1].zero_rates
        if not old > new > 0 or zeros < ENOUGH or _PART * zeros < checks[-1].count + 1:
            return False
    return True


def _scheduled_in_part(of: Checks) -> tuple[list[str], list[str]]:
    """The groups of an optimizer whose rates change, and those with parameters whose rates do not,
    although both had one rate at a check and have the same options. None of the latter if one of
    torch's schedulers sets them: it leaves a group alone only if it is asked to."""
    checks = next(iter(of.values()))
    rates = [[group.get("lr") for group in row] for row in zip(*(one.hyper for one in checks))]  # noqa: B905
    held = {piece.group for piece in checks[0].pieces}
    options = [{**group, "lr": "", "weight_decay": ""} for group in checks[0].hyper]
    moves = [at for at, own in enumerate(rates) if len(set(own)) >= ENOUGH]
    stays = [
        at for at, own in enumerate(rates)
        if at in held and len(set(own)) == 1 and own[0] not in (None, "0", "0.0")
        and "initial_lr" not in options[at]
        and any(own[0] in rates[one] and options[at] == options[one] for one in moves)
    ]  # fmt: skip
    return [f"group {at}" for at in moves], [f"group {at}" for at in stays]

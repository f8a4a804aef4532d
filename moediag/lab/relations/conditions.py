"""What must hold before a difference is a finding. The first condition that is not met ends it."""

from __future__ import annotations

import dataclasses
import math
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch

from moediag.lab.relations.relation import ZERO, Case, Relation, Tensors, Undecided
from moediag.lab.step.models.tiny_family import NotBuilt
from moediag.protocol import CONDITIONS, SIZES, WayOutcome
from moediag.recorder.not_applicable import NotApplicable

TIMES_ROUNDING = 32.0  # allowed error as a multiple of what one rounding of each weight changes
UNSTABLE = 0.05  # an output that one rounding changes by this share decides nothing
GRADIENT_OF = "gradient of "
SHOWN = 3  # differing tensors named in a text
STAYS = 0.1  # in float64 a real error keeps this share of its size in float32
TEXT = 300  # characters of an exception


Shares = Dict[str, float]  # by tensor, of its largest value


class Unstable(Undecided):
    """Rounding alone changes an output, so that nothing can be compared."""


@dataclass(frozen=True)
class Gap:
    """How one way differs from the plain one. ``names``: differing tensors, the worst first."""

    kind: str = ""  # "" | wrong | crash
    what: str = ""
    text: str = ""
    names: Tuple[str, ...] = ()
    error: float = 0.0
    tolerance: float = 0.0

    @property
    def shows(self) -> bool:
        return bool(self.kind)

    def same(self, other: Gap) -> bool:
        """Whether both show the same exception, or a difference in the same tensor."""
        if self.kind == "crash":
            return (self.kind, self.what) == (other.kind, other.what)
        return self.kind == other.kind and bool(set(self.names) & set(other.names))


def judge(relation: Relation, case: Case, way: str) -> WayOutcome:
    """Returns the outcome of one way. Raises NotApplicable, and what the plain way raises."""
    first = gap(relation, case, way)
    met: Dict[str, Optional[bool]] = {}
    for name in CONDITIONS if first.shows else ():
        met[name] = _CHECKS[name](relation, case, way, first)
        if met[name] is False:
            break
    return outcome(first, way, met)


def outcome(first: Gap, way: str, met: Dict[str, Optional[bool]]) -> WayOutcome:
    """``met``: the conditions that were checked."""
    if not first.shows:
        return WayOutcome(way, True, error=first.error, tolerance=first.tolerance)
    return WayOutcome(
        way, False, first.kind, first.what, first.text, _finite(first.error), first.tolerance, met
    )


def gap(relation: Relation, case: Case, way: str) -> Gap:
    """Compares ``way`` with the plain one. Raises NotApplicable, Undecided, and what the plain way
    raises."""
    plain = relation.plain(case, way)
    try:
        other = relation.other(case, way)
    except (NotApplicable, Undecided):
        raise
    except Exception as error:
        return _crash(error)
    first = compare(plain, other, _least_allowed(relation, plain))
    if first.shows and not relation.exact:
        first = compare(plain, other, allowed(relation, case, way, plain))
    what = relation.quantity(first.names) if first.shows else ""
    return dataclasses.replace(first, what=what or first.what)


def allowed(relation: Relation, case: Case, way: str, plain: Tensors) -> Shares:
    """Returns the tolerance of each tensor, as a share of its largest value: a multiple of what one
    rounding of each weight changes. Raises Unstable if that is no small share of an output."""
    nudged = relation.plain(dataclasses.replace(case, nudged=True), way)
    least = _least(plain)
    found = _least_allowed(relation, plain)
    for name, tensor in plain.items():
        share = _share(tensor, nudged[name], least)
        if not share <= UNSTABLE and not name.startswith(GRADIENT_OF):
            raise Unstable(f"one rounding of the weights changes {name} by {_percent(share)}")
        found[name] = max(TIMES_ROUNDING * share, found[name])
    return found


def compare(plain: Tensors, other: Tensors, tolerances: Shares) -> Gap:
    """Returns how ``other`` differs."""
    shares = dict.fromkeys([*plain, *other], math.inf)  # in the order of the model
    least = _least(plain)
    shares.update({n: _share(plain[n], other[n], least) for n in plain if n in other})
    wrong = [n for n, share in shares.items() if not share <= tolerances.get(n, 0.0)]
    if not wrong:
        worst = max(shares, key=lambda n: _rank(shares[n]), default="")
        return Gap(error=shares.get(worst, 0.0), tolerance=tolerances.get(worst, 0.0))
    what = _quantity(wrong)
    wrong.sort(key=lambda n: -_rank(shares[n]))
    shown = ", ".join(f"{name} by {_percent(shares[name])}" for name in wrong[:SHOWN])
    more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
    text = f"{len(wrong)} of {len(shares)} tensors differ: {shown}{more}"
    worst = wrong[0]
    return Gap("wrong", what, text, tuple(wrong), shares[worst], tolerances.get(worst, 0.0))


# ------------------------------------------------------------------------ conditions


def _control(relation: Relation, case: Case, way: str, _: Gap) -> bool:
    one, two = (relation.plain(case, way) for _ in range(2))
    finite = all(bool(torch.isfinite(t).all()) for t in one.values())
    return finite and not compare(one, two, _least_allowed(relation, one)).shows


def _again(changed: Callable[[Case], Case]) -> Callable[[Relation, Case, str, Gap], bool]:
    def check(relation: Relation, case: Case, way: str, first: Gap) -> bool:
        try:
            return first.same(gap(relation, changed(case), way))
        except Exception:
            return False  # the plain way failed there: nothing was shown

    return check


def _float64(relation: Relation, case: Case, way: str, first: Gap) -> Optional[bool]:
    if relation.exact or first.kind == "crash":
        return None
    wide = dataclasses.replace(case, dtype=torch.float64)
    try:
        plain, other = relation.plain(wide, way), relation.other(wide, way)
    except Exception:
        return None  # a kernel that has no float64
    found = compare(plain, other, _least_allowed(relation, plain))
    return first.same(found) and (found.error >= STAYS * first.error or math.isinf(first.error))


def _second(relation: Relation, case: Case, way: str, first: Gap) -> Optional[bool]:
    if first.kind == "crash":
        return None  # the plain way ran: that is the other route
    if not relation.route:
        return False
    try:
        return relation.second(case, way, first.names) is True
    except Exception:
        return False


_CHECKS: Dict[str, Callable[[Relation, Case, str, Gap], Optional[bool]]] = {
    "control": _control,
    "twice": _again(lambda case: case),
    "other-seed": _again(lambda case: dataclasses.replace(case, seed=1)),
    "other-size": _again(lambda case: dataclasses.replace(case, size=SIZES[1])),
    "float64": _float64,
    "second-route": _second,
}


# ------------------------------------------------------------------------ numbers and words


def _share(plain: torch.Tensor, other: torch.Tensor, least: float = 0.0) -> float:
    """Returns the largest difference as a share of the largest value, or of ``least``; inf if
    shapes or infinities differ."""
    if plain.shape != other.shape:
        return math.inf
    if plain.numel() == 0 or torch.equal(plain, other):
        return 0.0
    difference = float((plain.double() - other.double()).abs().max())
    scale = max(float(plain.double().abs().max()), least)
    return difference / scale if scale > 0 and math.isfinite(difference) else math.inf


def _least(tensors: Tensors) -> float:
    """Returns the scale below which a tensor counts as zero beside the others."""
    largest = [float(t.abs().max()) for t in tensors.values() if t.numel()]
    finite = [value for value in largest if math.isfinite(value)]
    return ZERO * max(finite, default=0.0)


def _least_allowed(relation: Relation, plain: Tensors) -> Shares:
    return dict.fromkeys(plain, 0.0 if relation.exact else relation.floor)


def _rank(share: float) -> float:
    return math.inf if math.isnan(share) else share


def _finite(value: float) -> Optional[float]:
    return value if math.isfinite(value) else None


def _percent(share: float) -> str:
    return f"{share:.2g} of its largest value" if math.isfinite(share) else "everything"


def _quantity(wrong: Sequence[str]) -> str:
    """Returns what differs, without what depends on the family."""
    kinds = [name for name in ("logits", "loss") if any(n.startswith(name) for n in wrong)]
    if kinds:
        return kinds[0]
    if wrong[0].startswith(GRADIENT_OF):
        return "gradients"
    return ".".join(part for part in wrong[0].split(".")[-2:] if not part.isdigit())


def _crash(error: Exception) -> Gap:
    """Describes an exception by its type and the innermost frame of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent)
    place = next((f for f in reversed(frames) if not f.filename.startswith(ours)), frames[-1])
    what = f"{type(error).__name__} in {_file(place.filename)} {place.name}"
    return Gap("crash", what, _crash_text(error), error=math.inf)


def _file(path: str) -> str:
    """Returns the base name; of a family's own module without the family."""
    name = Path(path).name
    return name.split("_")[0] if name.startswith(("modeling_", "configuration_")) else name


def undecided(way: str, error: BaseException) -> WayOutcome:
    """Returns the outcome of a way that cannot be judged: its plain side failed, say."""
    if isinstance(error, Undecided):
        return WayOutcome(way, None, text=str(error))
    return WayOutcome(way, None, text=f"the plain way failed: {_crash_text(error)}")


def _crash_text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:TEXT]}"


def outcomes(relation: Relation, case: Case) -> List[WayOutcome]:
    """Returns the outcome of each way. Raises NotApplicable if none applies, and NotBuilt."""
    found: List[WayOutcome] = []
    reasons: List[str] = []
    for way in relation.ways(case):
        try:
            found.append(judge(relation, case, way))
        except NotApplicable as reason:
            reasons.append(str(reason))
        except NotBuilt:
            raise
        except Exception as error:
            found.append(undecided(way, error))
    if not found and reasons:
        raise NotApplicable("; ".join(dict.fromkeys(reasons)))
    return found

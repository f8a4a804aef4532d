"""The result object that every view renders, and the words of a result."""

from moediag.result.chart_data import ExpertTokens, LayerError, TimedCall, TimedRank
from moediag.result.diagnosis import (
    Diagnosis,
    FirstDivergence,
    Lane,
    LaneCell,
    PathLine,
    Place,
    RankSide,
    RankState,
    SideBySide,
)
from moediag.result.result_file import read_result
from moediag.result.run_result import (
    RESULT_FILE,
    ClaimJudgement,
    Conclusion,
    FixJudgement,
    RunResult,
    Seconds,
    TrialResult,
)
from moediag.result.table import Cell, Table
from moediag.result.verdicts import FAILURES, Confidence, Effect, Role, Verdict

__all__ = [
    "FAILURES",
    "RESULT_FILE",
    "Cell",
    "ClaimJudgement",
    "Conclusion",
    "Confidence",
    "Diagnosis",
    "Effect",
    "ExpertTokens",
    "FirstDivergence",
    "FixJudgement",
    "Lane",
    "LaneCell",
    "LayerError",
    "PathLine",
    "Place",
    "RankSide",
    "RankState",
    "Role",
    "RunResult",
    "Seconds",
    "SideBySide",
    "Table",
    "TimedCall",
    "TimedRank",
    "TrialResult",
    "Verdict",
    "read_result",
]

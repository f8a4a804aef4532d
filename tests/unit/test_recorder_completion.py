"""When operations that nobody waits for are noted as done."""

from __future__ import annotations

from typing import Any

from moediag.recorder.completion import Completion


class Log:
    def __init__(self) -> None:
        self.noted: list[int] = []

    def done(self, number: int) -> None:
        self.noted.append(number)


class Work:
    """Completed when asked for the ``looks``-th time."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left <= 0


def made(**works: Any) -> tuple[Completion, Log]:
    log = Log()
    completion = Completion(log)  # type: ignore[arg-type]
    completion._native = {int(name[1:]): work for name, work in works.items()}
    return completion, log


def test_what_ends_a_moment_later_is_noted_at_the_end() -> None:
    completion, log = made(n3=Work(4), n5=Work(1))
    completion.poll()
    assert log.noted == [5]
    completion.settle()
    assert log.noted == [5, 3]


def test_what_never_ends_stays_open_and_keeps_nobody() -> None:
    completion, log = made(n3=Work(10**9), n4=Work(1), n7=None)
    completion.settle(0.01)
    assert log.noted == [4]
    assert sorted(completion._native) == [3, 7]


def test_nothing_known_is_not_waited_for() -> None:
    work = made(n7=None)[0]
    work.settle(1e9)  # returns at once

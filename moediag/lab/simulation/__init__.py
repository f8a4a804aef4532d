"""A rank whose peers do not exist: torch's ``fake`` process group, answered and followed."""

from moediag.lab.simulation.answers import Answers

__all__ = ["Answers"]

"""Runs many items one by one, with a journal, resume, interruption, a time limit and a display."""

from moediag.lab.campaign.engine.clock import Clock
from moediag.lab.campaign.engine.crew import Crew
from moediag.lab.campaign.engine.display import Display, Line, shown
from moediag.lab.campaign.engine.drive import Strategy, drive, resumable
from moediag.lab.campaign.engine.journal import Header, Journal, Records, opened

__all__ = [
    "Clock",
    "Crew",
    "Display",
    "Header",
    "Journal",
    "Line",
    "Records",
    "Strategy",
    "drive",
    "opened",
    "resumable",
    "shown",
]

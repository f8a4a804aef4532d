"""Runs many items one by one, with a journal, resume, interruption, a time limit and a display."""

from moediag.campaign.engine.clock import Clock
from moediag.campaign.engine.crew import Crew
from moediag.campaign.engine.display import Display, Line, shown
from moediag.campaign.engine.drive import Strategy, drive, resumable
from moediag.campaign.engine.journal import Header, Journal, Records, opened

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

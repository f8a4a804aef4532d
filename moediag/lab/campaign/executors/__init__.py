"""Runs the items of a campaign as jobs of an engine that users already have: Slurm, Ray."""

from moediag.lab.campaign.executors.choice import HERE, Choice, opened
from moediag.lab.campaign.executors.environments import build_here
from moediag.lab.campaign.executors.executor import Lost
from moediag.lab.campaign.executors.remote import Remote

__all__ = ["HERE", "Choice", "Lost", "Remote", "build_here", "opened"]

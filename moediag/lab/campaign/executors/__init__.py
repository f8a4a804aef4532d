"""Runs the items of a campaign as jobs of an engine that users already have: Slurm, Ray."""

from moediag.lab.campaign.executors.choice import HERE, Choice, opened
from moediag.lab.campaign.executors.executor import Lost
from moediag.lab.campaign.executors.maker import Maker
from moediag.lab.campaign.executors.remote import Remote

__all__ = ["HERE", "Choice", "Lost", "Maker", "Remote", "opened"]

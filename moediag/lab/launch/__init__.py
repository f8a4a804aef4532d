"""Launchers of trials: forked ranks in a warm process, or torchrun, on one or several nodes."""

__all__ = ["launcher"]

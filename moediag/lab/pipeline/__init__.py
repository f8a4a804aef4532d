"""From a question to a result: the trials of a scenario, and checks before a launch."""

__all__ = ["check", "observer", "planned_rows", "trials"]

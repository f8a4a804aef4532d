"""From a question to a result: the trials of a scenario, a watched job, evidence on disk."""

__all__ = ["examine", "observer", "rows", "run_folder", "trials", "watch"]

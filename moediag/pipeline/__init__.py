"""From a question to a result: a run of a scenario, a watched job, evidence on disk."""

__all__ = ["examine", "observer", "run_folder", "trials", "watch"]

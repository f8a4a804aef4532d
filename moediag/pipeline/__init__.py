"""From a question to a result: a watched or verified job, evidence on disk."""

__all__ = ["examine", "rows", "run_folder", "verify", "watch"]

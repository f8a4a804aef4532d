"""Finds running training jobs that were started without moediag, and looks at them from outside."""

__all__ = ["found_jobs"]

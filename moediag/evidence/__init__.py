"""Readers: the files that a trial, a watched job or another tool left behind, as one `Evidence`."""

__all__ = ["foreign", "launch_record", "model", "nodes", "rank_stacks", "sources", "trial_folder"]

"""Finds the commit between two releases, in a local clone or under `git bisect run`."""

__all__ = ["clone", "commit_answer", "commits", "git_bisect"]

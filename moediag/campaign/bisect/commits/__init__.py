"""From releases to commits: the repository of a package and `git bisect` over it."""

__all__ = ["clone", "commit_answer", "commits", "git_bisect"]

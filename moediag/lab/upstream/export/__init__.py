"""`moediag export`: one Python file that shows a failure without moediag, for an upstream issue."""

__all__ = ["write_file"]

"""The `moediag` command line: each module parses one command, calls, and returns its exit code."""

from moediag.cli.app import main

__all__ = ["main"]

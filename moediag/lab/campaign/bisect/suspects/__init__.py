"""Ranks the functions that changed between two releases by what the failing trial ran."""

__all__ = ["attribution", "suspects"]

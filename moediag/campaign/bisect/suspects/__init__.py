"""What changed between two releases and ran in the trial, the most likely first."""

__all__ = ["attribution", "installed_source", "suspects"]

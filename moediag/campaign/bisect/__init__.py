"""The release that broke it, the release that fixed it: a pure search and what surrounds it."""

__all__ = [
    "answer_page",
    "candidates",
    "commits",
    "probe",
    "probe_verdict",
    "question",
    "search",
    "session",
    "signature_match",
    "timeline",
]

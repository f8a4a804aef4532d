"""Writes facts as text and tables, with the names of the user's model."""

__all__ = [
    "calls",
    "cause",
    "device_sentences",
    "divergence_view",
    "foreign_jobs",
    "node_sentences",
    "replica_sentences",
    "schedule_view",
    "trial_tables",
]

"""Writes facts as text and tables, with the names of the user's model."""

__all__ = [
    "calls",
    "cause",
    "detector_table",
    "device_sentences",
    "divergence_view",
    "foreign_jobs",
    "node_sentences",
    "program_tables",
    "replica_sentences",
    "schedule_view",
]

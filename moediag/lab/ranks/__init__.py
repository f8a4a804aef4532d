"""The processes that start the ranks of a trial."""

"""What ranks measured, against the single-process reference and against each other."""

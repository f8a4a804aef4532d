"""Whether `moediag resume` finds what real libraries lose of a checkpoint."""

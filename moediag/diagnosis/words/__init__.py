"""Facts in words and tables, in the names of the user's own model."""

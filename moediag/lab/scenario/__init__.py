"""What to run: scenario files as strict types, the catalogue of them, and the plan of trials."""

__all__ = ["catalogue", "explain", "load", "plan", "schema", "sections", "source"]

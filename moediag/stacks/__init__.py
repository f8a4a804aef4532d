"""Software stacks: which releases a package has, and environments that hold exact releases."""

__all__ = ["base", "built", "environment", "first_import", "interpreter", "offline", "releases"]

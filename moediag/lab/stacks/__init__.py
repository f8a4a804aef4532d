"""Software stacks: the releases of packages, and environments with exact releases."""

__all__ = ["base", "built", "environment", "first_import", "interpreter", "offline", "releases"]

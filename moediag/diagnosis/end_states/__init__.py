"""How each rank ended, and where it stood."""

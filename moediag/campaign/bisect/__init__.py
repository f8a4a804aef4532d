"""The release that broke it, the release that fixed it: a pure search and what surrounds it."""

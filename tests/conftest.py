"""Which tests may run side by side."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that launch ranks share hosts and cached runs, and two launches at once would slow each
    other: all of them go to one worker, the others to the rest (``--dist loadgroup``)."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("e2e", "stack", "wide")):
            item.add_marker(pytest.mark.xdist_group("ranks"))

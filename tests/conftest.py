"""Under pytest-xdist (`--dist loadgroup`) the tests of a file stay on one worker: they share worlds and fixtures."""

from __future__ import annotations

import pytest

DECODING = ("decoding", "generation", "evaluation")
"""Folders that share the session fixtures of tests/unit_tests/conftest.py."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = "decoding" if item.path.parent.name in DECODING else item.nodeid.split("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))

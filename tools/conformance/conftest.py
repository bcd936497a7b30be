"""The tests' own fixtures and time limits, for a tier that stands outside of their folder."""

pytest_plugins = ["tests.conftest"]

"""The fixtures and time limits of ``tests/``, for a tier that stands outside of it."""

pytest_plugins = ["shared_fixtures"]

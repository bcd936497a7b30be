"""The fixtures and time limits of ``tests/``, for tests outside that folder."""

pytest_plugins = ["shared_fixtures"]

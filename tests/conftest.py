"""All fixtures are those of ``helpers/shared_fixtures.py``."""

pytest_plugins = ["shared_fixtures"]

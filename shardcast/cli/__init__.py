"""The ``shardcast`` command."""

from shardcast.cli.commands import main

__all__ = ["main"]

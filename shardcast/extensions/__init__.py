"""Options: each has a module of its own here, which nothing in the core imports.

A module declares its option as ``OPTION``, an :class:`.option_values.Option`, and one line of
:class:`.ShardcastConfig` registers it: ``metrics: bool | int = extension(False, "metrics")``. It is
imported where a configuration asks for it, or where its help is shown.
"""

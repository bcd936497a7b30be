"""Options: each has its own module here, which nothing in the core imports.

A module declares its option as ``OPTION``, an :class:`.option_values.Option`. One line of
:class:`.ShardcastConfig` registers it: ``metrics: bool | int = extension(False, "metrics")``. The
module is imported if a configuration uses the option, or to show its help.
"""

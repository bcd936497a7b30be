"""sync: the owners' updated spans to everybody."""

"""sync: the owners' updated spans to everybody.

``sync`` sends packs as their algorithms say.
"""

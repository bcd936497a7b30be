"""sync: the owners' updated spans to everybody.

``sync`` has one of the ``ways`` for each pack, as its algorithm says; ``overlap`` runs it beside
the next forward.
"""

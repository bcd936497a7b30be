"""sync: the owners' updated spans to everybody.

``sync`` goes one of the ``ways`` for each pack, as its route says; ``overlap`` runs it beside the
next forward.
"""

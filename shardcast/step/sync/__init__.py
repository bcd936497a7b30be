"""sync: the owners' updated spans to everybody.

``sync`` sends packs as their algorithms say; ``overlap`` runs it beside the next forward.
"""

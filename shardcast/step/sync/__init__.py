"""sync: the owners' updated spans to everybody.

``sync`` calls one ``strategy`` per pack (``all_gather``, ``broadcast``, ``messages``), as the
pack's route says; ``overlap`` runs it beside the next forward.
"""

"""sync: send the owners' updated spans to all ranks.

``sync`` sends each pack by its algorithm.
"""

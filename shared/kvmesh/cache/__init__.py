"""Paged KV cache: page layout, pools, prefix tree, eviction, and the sequences and leases that hold pages.

``layout`` is the vocabulary that models and the transceiver share; ``manager`` is what the engine drives.
"""

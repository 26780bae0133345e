"""Tensor and pipeline parallel ranks: one engine in several processes that compute every step together."""

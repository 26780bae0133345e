"""Adapters: how to prefill, hand off and decode with the workers of one engine."""

"""The generation server: a process around one engine."""

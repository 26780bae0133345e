"""The context server: a process around one engine."""

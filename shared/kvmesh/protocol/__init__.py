"""Every message that crosses a process border; one module per conversation."""

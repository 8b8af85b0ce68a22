"""What survives a restart: compiled graphs on disk."""

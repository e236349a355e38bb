"""What a command does, put together."""

"""What the machine and torch are set to: devices, settings that threads share, warnings that are given once."""

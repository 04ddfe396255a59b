"""hetlab package: sim."""

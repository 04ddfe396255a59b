"""hetlab package: real_runtime."""

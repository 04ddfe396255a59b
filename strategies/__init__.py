"""hetlab package: strategies."""

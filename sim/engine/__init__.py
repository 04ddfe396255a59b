"""hetlab package: sim/engine."""

"""hetlab package: sim/cost."""

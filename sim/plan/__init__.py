"""hetlab package: sim/plan."""

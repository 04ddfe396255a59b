"""hetlab package: sim/spec."""

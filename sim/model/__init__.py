"""hetlab package: sim/model."""

"""hetlab package: sim/hardware."""

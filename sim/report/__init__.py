"""hetlab package: sim/report."""

"""hetlab package: sim/interop."""

"""The decoder that a plan trains: parameters, tensor parallelism, blocks, loss, weight files."""

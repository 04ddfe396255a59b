"""Search: from a problem to the best plan, over arrays of candidates."""

"""The model's operators on every device against a float64 reference: ``hetlab doctor ops``."""

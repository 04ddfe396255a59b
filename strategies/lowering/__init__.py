"""Lowering pass ``segments``: stages run segment by segment, see strategies.lowering.segments."""

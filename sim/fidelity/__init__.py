"""Measured runs against predictions: read them, build their plans, score and fit."""

"""Measure this machine and write it down as profiles that plans are made with."""

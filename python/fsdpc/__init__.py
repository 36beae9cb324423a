"""Fully sharded data parallel training: a C engine under thin Python."""

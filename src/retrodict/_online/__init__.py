"""Posteriors that are carried along a stream, in memory that does not grow with it."""

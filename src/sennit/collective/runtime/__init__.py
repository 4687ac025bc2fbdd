"""Compiled collectives that run: their flat code, and the machines that interpret it."""

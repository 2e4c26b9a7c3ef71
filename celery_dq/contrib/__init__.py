"""Doors into other frameworks; each is loaded only by its own framework."""

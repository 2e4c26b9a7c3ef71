"""Queues that one elected worker consumes: who leads them here, what that means, and what enforces it."""

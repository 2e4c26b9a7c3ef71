"""The tenant broker on a Redis Cluster."""

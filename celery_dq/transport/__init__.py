"""The brokers: kombu transports that keep their word."""

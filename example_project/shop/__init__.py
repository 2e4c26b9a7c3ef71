"""The shop platform: merchants, orders, and the delivery of notices about them."""

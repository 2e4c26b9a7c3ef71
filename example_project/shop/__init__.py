"""The shop platform: merchants, orders, and the deliveries that tell merchants about them."""

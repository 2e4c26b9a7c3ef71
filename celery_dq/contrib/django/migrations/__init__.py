"""Migrations of the model without a table, which make the permissions."""
